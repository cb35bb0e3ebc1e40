"""What tests of bad arguments send to the interpreting process."""

from collections.abc import Callable
from typing import Any

import torch

from pagefleet_kernels import ops
from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.errors import KernelArgumentError
from pagefleet_kernels.sampling_batch import SamplingBatch
from pagefleet_kernels.triton import make_backend
from support.hostile import BLOCK_SIZE, NUM_BLOCKS, SHAPE
from support.triton_work import CPU


def refusal_at_the_door(name: str, change: dict[str, Any]) -> str:
    """The text of the error that one changed argument of a well-formed call raises; empty when it is taken."""
    backend = make_backend()
    cache = backend.allocate(KVShape(2, 16, 16), num_blocks=3, block_size=16, dtype=torch.float32, device=CPU)
    rows = torch.randn(2, 2, 16)
    vectors = {
        kind: torch.zeros(2, dtype=dtype)
        for kind, dtype in (
            ("temperature", torch.float32), ("top_k", torch.int32), ("top_p", torch.float32),
            ("min_p", torch.float32), ("seeds", torch.int64), ("positions", torch.int64),
        )
    }  # fmt: skip
    calls: dict[str, tuple[Any, dict[str, Any]]] = {
        "rope_write_kv": (
            backend.rope_write_kv,
            {
                "query": rows, "key": rows, "value": rows, "cache": cache, "slot_mapping": torch.tensor([16, -1]),
                "positions": torch.tensor([0, 1]), "cos_sin": torch.randn(4, 16),
            },
        ),
        "add_rms_norm": (
            backend.add_rms_norm, {"x": torch.randn(2, 16), "residual": None, "weight": torch.ones(16), "epsilon": 1e-6}
        ),
        "silu_mul": (backend.silu_mul, {"x": torch.randn(2, 16)}),
        "sample": (
            lambda logits, **batch: backend.sample(logits, SamplingBatch(**batch)),
            {"logits": torch.randn(2, 16), **vectors},
        ),
    }  # fmt: skip
    function, arguments = calls[name]
    try:
        function(**(arguments | change))
    except KernelArgumentError as error:
        return str(error)
    return ""


def refusals_of_shared_memory() -> list[str]:
    """What a program says of ops that write where they read, and of a scale that is no number."""
    backend = make_backend()
    cache = backend.allocate(KVShape(1, 16, 16), num_blocks=2, block_size=16, dtype=torch.float32, device=CPU)
    program = backend.program(dtype=torch.float32, device=CPU, max_rows=2)
    x, y, weight = program.buffer(16), program.buffer(16), torch.ones(16)
    heads, table = x.view(2, 1, 16), torch.ones(4, 16)
    rule: dict[str, Any] = {"scale": 1.0, "sliding_window": None, "softcap": None}
    calls: list[Callable[[], None]] = [
        lambda: program.linear(torch.nn.Identity(), x, x),
        lambda: program.norm(x, None, x, weight),
        lambda: program.activate(x, x, activation="silu", gated=False),
        lambda: program.norm(x, x, y, weight),
        lambda: program.attention(heads, cache, x, **rule),
        lambda: program.rope_write_kv(heads, heads, heads, cache, x, cos_sin=table),
        lambda: program.attention(heads, cache, y, **(rule | {"scale": float("nan")})),
    ]
    refusals = []
    for call in calls:
        try:
            call()
        except KernelArgumentError as error:
            refusals.append(str(error))
    return refusals


def attend_whatever(batch: AttentionBatch) -> str:
    """What came of it; a result holds only averages of the ones that every block but the null block holds."""
    backend = make_backend()
    cache = backend.allocate(SHAPE, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU)
    cache.memory[1:] = 1.0
    query = torch.ones(len(batch.slot_mapping), 4, SHAPE.head_dim)
    try:
        out = ops.paged_attention(backend, query, cache, batch, scale=1.0)
    except KernelArgumentError:
        return "refused"
    padding = (batch.seq_lens <= 0).repeat_interleave(batch.query_starts.diff())
    want = torch.where(padding[:, None, None], 0.0, torch.ones_like(out))
    return "computed" if torch.allclose(out, want) else f"wrong: {out}"


def draw_whatever(logits: list[float], rule: list[float], top_k: int, position: int) -> int:
    """The token."""
    temperature, top_p, min_p = (torch.tensor([number]) for number in rule)
    batch = SamplingBatch(
        temperature=temperature, top_k=torch.tensor([top_k], dtype=torch.int32), top_p=top_p, min_p=min_p,
        seeds=torch.tensor([5]), positions=torch.tensor([position]),
    )  # fmt: skip
    return int(make_backend().sample(torch.tensor([logits]), batch))


def rope_outside_its_table() -> torch.Tensor:
    """Turned rows at positions -1, 0 and 4 of a table of 4."""
    backend = make_backend()
    cache = backend.allocate(KVShape(1, 16, 16), num_blocks=3, block_size=16, dtype=torch.float32, device=CPU)
    rows = torch.randn(3, 1, 16)
    return backend.rope_write_kv(
        rows, rows, rows, cache, slot_mapping=torch.tensor([-1, -1, -1]), positions=torch.tensor([-1, 0, 4]),
        cos_sin=torch.randn(4, 16),
    )  # fmt: skip
