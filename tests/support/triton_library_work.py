"""What tests of the registered ops send to the interpreting process."""

from functools import partial
from typing import Any

import torch

from pagefleet_kernels.batch import KVShape
from pagefleet_kernels.errors import KernelArgumentError
from pagefleet_kernels.reference import make_backend as make_reference
from pagefleet_kernels.triton import make_backend
from pagefleet_kernels.triton.cache import TritonCache
from support.attention_oracle import CASES, build
from support.triton_work import CPU, poisoned_cache


def compiled_step(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Write, attend, norm and gate under torch.compile(fullgraph=True), beside the same without it."""
    case = CASES["decodes then chunks"]
    world = build(case, dtype=dtype)
    backend = make_backend()
    shape = case.shape

    def step(query: torch.Tensor, cache: TritonCache, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        backend.write_kv(cache, keys, values, world.history_slots)
        out = backend.paged_attention(query, cache, world.batch, scale=case.scale).flatten(1)
        residual = out * 0.5
        out = backend.add_rms_norm(out, residual, torch.ones_like(out[0]), epsilon=1e-6)
        return backend.silu_mul(out + residual)

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        cache = poisoned_cache(backend, shape, world.num_blocks, case.block_size, dtype)
        results.append(function(world.query, cache, world.history_keys, world.history_values))
    return results[0], results[1]


def opcheck(name: str) -> dict[str, str]:
    """torch's own checks of a registered op: schema (aliasing and mutation), fake tensors, autograd registration."""
    cache = make_backend().allocate(KVShape(2, 16, 16), num_blocks=3, block_size=16, dtype=torch.float32, device=CPU)
    rows, slots = torch.randn(2, 2, 16), torch.tensor([17, 40])
    geometry = (16, 2, 16, 16, None, None)
    wide, weight, ones = torch.randn(2, 32), torch.ones(32), torch.ones(2)
    int32 = partial(torch.tensor, dtype=torch.int32)
    turning = (slots, torch.tensor([0, 1]), torch.randn(4, 16), False, None, None, 1e-6)
    arguments: dict[str, tuple[Any, ...]] = {
        "write_kv": (cache.memory, *geometry, rows, rows, slots),
        "rope_write_kv": (torch.randn(2, 4, 16), rows, rows, cache.memory, *geometry, *turning),
        "copy_blocks": (cache.memory, torch.tensor([[1, 2]])),
        "rms_norm": (wide, weight, 1e-6, 0.0),
        "add_rms_norm": (wide, torch.randn(2, 32), weight, 1e-6, 0.0),
        "silu_mul": (wide,),
        "paged_attention": (
            torch.randn(2, 4, 16), cache.memory, *geometry, int32([0, 1, 2]), int32([3, 2]), int32([[1], [2]]), None,
            2, 1, 16, 0.25, 0, 0.0,
        ),
        "sample": (wide, ones, int32([0, 5]), ones, torch.zeros(2), torch.arange(2), torch.arange(2), *[None] * 5),
    }  # fmt: skip
    make_backend()
    op = getattr(torch.ops.pagefleet, name).default
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    return dict(torch.library.opcheck(op, arguments[name], test_utils=tests))


def refusal_of_dtype(dtype: torch.dtype) -> str:
    """The error's text."""
    try:
        make_backend().allocate(KVShape(1, 16, 16), num_blocks=2, block_size=16, dtype=dtype, device=CPU)
    except KernelArgumentError as error:
        return str(error)
    return ""


def refusal_of_foreign_cache() -> str:
    """The error's text."""
    foreign = make_reference().allocate(
        KVShape(1, 16, 16), num_blocks=2, block_size=16, dtype=torch.float32, device=CPU
    )
    rows = torch.zeros(1, 1, 16)
    try:
        make_backend().write_kv(foreign, rows, rows, torch.tensor([16]))
    except KernelArgumentError as error:
        return str(error)
    return ""


def block_bytes(dtype: torch.dtype, shape: KVShape) -> tuple[int, int]:
    """(bytes said per block, bytes held by three)."""
    backend = make_backend()
    cache = backend.allocate(shape, num_blocks=3, block_size=16, dtype=dtype, device=CPU)
    return backend.bytes_per_block(shape, block_size=16, dtype=dtype), cache.num_bytes
