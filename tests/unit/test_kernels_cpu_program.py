"""Programs of the CPU library against the same programs of plain torch."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagefleet_kernels import ops
from pagefleet_kernels.backend import Program
from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.cpu.backend import CpuBackend
from pagefleet_kernels.cpu.library import find_library
from pagefleet_kernels.errors import BackendUnavailable, KernelArgumentError

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, BLOCK = 40, 6, 2, 24, 56, 16
CPU = torch.device("cpu")


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def batch_of(lens: list[int], rows: list[int]) -> tuple[AttentionBatch, torch.Tensor]:
    """Sequences of so many tokens, the last `rows` of each in this step, on blocks of their own."""
    blocks = [-(-n // BLOCK) for n in lens]
    tables = torch.zeros(len(lens), max(blocks), dtype=torch.int32)
    free = iter(range(1, 1 + sum(blocks)))
    for table, count in zip(tables, blocks, strict=True):
        table[:count] = torch.tensor([next(free) for _ in range(count)])
    positions = torch.tensor([p for n, r in zip(lens, rows, strict=True) for p in range(n - r, n)])
    owners = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(rows))
    slots = tables[owners, positions // BLOCK].long() * BLOCK + positions % BLOCK
    starts = torch.tensor([sum(rows[:i]) for i in range(len(rows) + 1)], dtype=torch.int32)
    decodes = next((i for i, r in enumerate(rows) if r != 1), len(rows))
    return (
        AttentionBatch(starts, torch.tensor(lens, dtype=torch.int32), tables, slots, decodes, max(rows), max(lens)),
        positions,
    )


def layer(program: Program, backend: CpuBackend, dtype: torch.dtype, **kind: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer with every trait: returns its input and output buffers."""
    cache = ops.allocate(
        backend, KVShape(KV_HEADS, HEAD_DIM, HEAD_DIM), num_blocks=16, block_size=BLOCK, dtype=dtype, device=CPU
    )

    def linear(n: int, k: int, seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
        packed = ops.pack_linear(
            backend, normal(n, k, dtype=dtype, seed=seed) / 6, normal(n, dtype=dtype, seed=seed + 1)
        )
        assert packed is not None
        return packed

    centred, gated = kind.get("centred", False), kind.get("gated", True)
    x, normed, out = program.buffer(HIDDEN), program.buffer(HIDDEN), program.buffer(HIDDEN)
    width = HEADS * HEAD_DIM
    qkv, turned, attended = (program.buffer(n) for n in (width + 2 * KV_HEADS * HEAD_DIM, width, width))
    mlp, mid = program.buffer(MLP * (2 if gated else 1)), program.buffer(MLP)
    norm: dict[str, Any] = {"epsilon": 1e-5, "weight_offset": 1.0, "centred": centred}
    bias = normal(HIDDEN, dtype=dtype, seed=3) if centred else None
    program.norm(x, None, normed, normal(HIDDEN, dtype=dtype, seed=2), bias=bias, **norm)
    program.linear(linear(qkv.shape[1], HIDDEN, 10), normed, qkv)
    heads = qkv.view(qkv.shape[0], -1, HEAD_DIM)
    query, key, value = torch.split(heads, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    angles = torch.outer(torch.arange(64.0), torch.tensor([1.0, 0.3, 0.1, 0.03]))
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    head_norm = normal(HEAD_DIM, dtype=dtype, seed=4)
    program.rope_write_kv(
        query, key, value, cache, turned, cos_sin=table, query_norm=head_norm, key_norm=head_norm, norm_offset=1.0
    )
    program.attention(turned.view(-1, HEADS, HEAD_DIM), cache, attended, scale=0.2, sliding_window=9, softcap=4.0)
    program.linear(linear(HIDDEN, width, 20), attended, out)
    program.norm(out, x, normed, normal(HIDDEN, dtype=dtype, seed=5), x_scale=0.3, **norm)
    program.linear(linear(mlp.shape[1], HIDDEN, 30), normed, mlp)
    program.activate(mlp, mid, activation="silu" if gated else "gelu_tanh", gated=gated)
    program.linear(linear(HIDDEN, MLP, 40), mid, out)
    program.norm(out, x, None, None, x_scale=0.3)
    return x, x


def run(dtype: torch.dtype, *, plain: bool, threads: int = 1, **kind: bool) -> torch.Tensor:
    backend = CpuBackend(find_library(), num_threads=threads)
    program = ops.new_program(backend, dtype=dtype, device=CPU, max_rows=40, plain=plain)
    x, out = layer(program, backend, dtype, **kind)
    results: list[torch.Tensor] = []
    for lens, rows in (([20, 7], [20, 7]), ([21, 8], [1, 1]), ([22, 30], [1, 22])):
        batch, positions = batch_of(lens, rows)
        x[: len(positions)] = normal(len(positions), HIDDEN, dtype=dtype, seed=len(results))
        program.run(batch, positions)
        results.append(out[: len(positions)].clone())
    return torch.cat(results)


@pytest.mark.parametrize("kind", [{}, {"centred": True}, {"gated": False}])
def test_the_library_computes_what_torch_computes(kind: dict[str, bool]) -> None:
    got, want = run(torch.float32, plain=False, **kind), run(torch.float32, plain=True, **kind)
    assert float((got - want).abs().max()) <= 2e-5 * float(want.abs().max())


def test_bfloat16_is_near_float32() -> None:
    got, want = run(torch.bfloat16, plain=False).float(), run(torch.bfloat16, plain=True).float()
    assert float((got - want).abs().max()) <= 0.05 * float(want.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_that_stay_awake_change_no_bit(dtype: torch.dtype) -> None:
    alone = run(dtype, plain=False)
    for _ in range(5):
        assert torch.equal(run(dtype, plain=False, threads=3), alone)


def test_a_program_can_be_extended_after_a_run() -> None:
    backend = CpuBackend(find_library(), num_threads=1)
    program = backend.program(dtype=torch.float32, max_rows=4)
    x, y, z = (program.buffer(8) for _ in range(3))
    x[:], weight = normal(4, 8, dtype=torch.float32), torch.ones(8)
    batch, positions = batch_of([1, 1, 1], [1, 1, 1])
    program.norm(x, None, y, weight)
    program.run(batch, positions)
    program.norm(y, None, z, weight)
    program.run(batch, positions)
    assert torch.allclose(z[:3], y[:3])


def attend(program: Program, **change: Any) -> None:
    """One op over a small cache, changed."""
    cache = CpuBackend(find_library()).allocate(
        KVShape(1, 8, 8), num_blocks=2, block_size=16, dtype=torch.float32, device=CPU
    )
    rule = {"scale": 1.0, "sliding_window": None, "softcap": None} | change
    program.attention(program.buffer(8).view(-1, 1, 8), cache, program.buffer(8), **rule)


@pytest.mark.parametrize("threads", [1, 3])
def test_layers_that_share_a_division_of_work_compute_and_refuse_as_alone(threads: int) -> None:
    """Work is divided once for all layers alike: another window, other heads or another cache size are not."""
    backend, alone = (CpuBackend(find_library(), num_threads=count) for count in (threads, 1))
    batch, positions = batch_of([1100, 5, 700], [1, 1, 1])
    program = backend.program(dtype=torch.bfloat16, max_rows=3)
    wanted: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []
    layers = [(2, 130, None, 1.0), (2, 130, None, 0.5), (2, 130, 40, 1.0), (1, 130, None, 1.0), (2, 131, None, 1.0)]
    for seed, (kv_heads, num_blocks, window, scale) in enumerate(layers):
        shape = KVShape(kv_heads, 32, 32)
        cache = backend.allocate(shape, num_blocks=num_blocks, block_size=BLOCK, dtype=torch.bfloat16, device=CPU)
        rows = normal(2, 130 * BLOCK, kv_heads, 32, dtype=torch.bfloat16, seed=seed)
        backend.write_kv(cache, rows[0], rows[1], torch.arange(130 * BLOCK))
        query = normal(3, 6, 32, dtype=torch.bfloat16, seed=seed)
        rule: dict[str, Any] = {"scale": scale, "sliding_window": window, "softcap": None}
        out = program.buffer(6 * 32)
        program.attention(query, cache, out, **rule)
        wanted.append((out, functools.partial(alone.paged_attention, query, cache, batch, **rule)))
    for _ in range(2):
        program.run(batch, positions)
        assert all(torch.equal(out, want().view(3, -1)) for out, want in wanted)
        batch.seq_lens.sub_(3)  # the same arrays in the next step

    small = backend.allocate(KVShape(2, 32, 32), num_blocks=40, block_size=BLOCK, dtype=torch.bfloat16, device=CPU)
    program.attention(
        program.buffer(6 * 32).view(3, 6, 32),
        small,
        program.buffer(6 * 32),
        scale=1.0,
        sliding_window=None,
        softcap=None,
    )
    with pytest.raises(KernelArgumentError, match="outside the cache"):
        program.run(batch, positions)


def test_what_is_written_shares_no_memory_with_what_is_read() -> None:
    """A row is written while others are still read, by other threads too."""
    backend = CpuBackend(find_library(), num_threads=1)
    program = backend.program(dtype=torch.float32, max_rows=4)
    x, y, z = (program.buffer(16) for _ in range(3))
    near = torch.zeros(5 * 16)
    before, behind = near[:64].view(4, 16), near[16:].view(4, 16)
    linear = backend.pack_linear(torch.ones(16, 16), None)
    assert linear is not None
    cache = backend.allocate(KVShape(1, 4, 4), num_blocks=2, block_size=16, dtype=torch.float32, device=CPU)
    rule: dict[str, Any] = {"scale": 1.0, "sliding_window": None, "softcap": None}
    table = torch.ones(4, 4)
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("out is in the memory of x", lambda: program.linear(linear, x, x)),
        ("out is in the memory of x", lambda: program.linear(linear, before, behind)),
        ("out is in the memory of x", lambda: program.norm(x, None, x, torch.ones(16))),
        ("residual is in the memory of x", lambda: program.norm(before, behind, x, torch.ones(16))),
        ("out is in the memory of residual", lambda: program.norm(x, y, y, torch.ones(16))),
        ("out is in the memory of x", lambda: program.activate(x, x, activation="silu", gated=False)),
        ("out is in the memory of query", lambda: program.attention(x.view(4, 4, 4), cache, x, **rule)),
        (
            "turned is in the memory of key",
            lambda: program.rope_write_kv(
                x.view(4, 4, 4), y[:, :4].view(4, 1, 4), z[:, :4].view(4, 1, 4), cache, y, cos_sin=table
            ),
        ),
        ("residual is in the memory of x", lambda: backend.add_rms_norm(before, behind, x[0], epsilon=1e-6)),
    ]
    for want, call in wrong:
        with pytest.raises(KernelArgumentError, match=want):
            call()
    program.linear(linear, before, x)
    query, key, value = torch.split(torch.zeros(4, 24), [16, 4, 4], dim=1)  # parts of one projection
    program.rope_write_kv(query.view(4, 4, 4), key.view(4, 1, 4), value.view(4, 1, 4), cache, y, cos_sin=table)


def test_what_does_not_fit_is_refused() -> None:
    backend = CpuBackend(find_library(), num_threads=1)
    program = backend.program(dtype=torch.float32, max_rows=2)
    x, y = program.buffer(8), program.buffer(8)
    with pytest.raises(KernelArgumentError, match="weight"):
        program.norm(x, None, y, torch.ones(7))
    with pytest.raises(KernelArgumentError, match="out"):
        program.norm(x, None, None, None)
    with pytest.raises(KernelArgumentError, match="x is"):
        program.activate(x, y, activation="silu", gated=True)
    with pytest.raises(BackendUnavailable, match="relu"):
        program.activate(x, y, activation="relu", gated=False)
    with pytest.raises(BackendUnavailable, match="laid out"):
        program.linear(torch.nn.Linear(8, 8), x, y)
    with pytest.raises(BackendUnavailable, match="float16"):
        backend.program(dtype=torch.float16, max_rows=2)
    half: Any = 1.5
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: program.norm(x[0], None, y, torch.ones(8)), "x is of shape"),
        (lambda: program.activate(x, y[0], activation="silu", gated=False), "out is of shape"),
        (lambda: program.buffer(half), "width is 1.5"),
        (lambda: program.buffer(0), "width is 0"),
        (lambda: attend(program, scale=float("nan")), "scale is nan"),
        (lambda: attend(program, sliding_window=-1), "sliding_window is -1"),
        (lambda: attend(program, softcap=-1.0), "softcap is -1.0"),
        (lambda: CpuBackend(find_library(), num_threads=half), "num_threads is 1.5"),
        (lambda: CpuBackend(find_library(), num_threads=2**32), "num_threads is 4294967296"),
    ]
    for call, want in refused:
        with pytest.raises(KernelArgumentError, match=want):
            call()
    program.norm(x, None, y, torch.ones(8))
    with pytest.raises(KernelArgumentError, match="of 3 rows; it must be of 2 at most"):
        program.run(*batch_of([1, 1, 1], [1, 1, 1]))
