"""Are the kernels right on this device? Held to the plain backend in float64, with poisoned memory, before timing."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.reference import make_backend as make_reference

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
RAGGED = ((1, 5), (1, 300), (1, 0), (1, 4097), (1, 16), (33, 33), (200, 1000), (1, 77), (5, 4100), (0, 9))
"""(rows, length after them): decodes first, padding, one long, chunks behind a prefix, an empty sequence."""


@dataclass(frozen=True, slots=True)
class CheckCase:
    """One attention call to hold against the oracle."""

    name: str
    shape: KVShape
    heads: int
    storage: torch.dtype = BF16
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    sequences: tuple[tuple[int, int], ...] = RAGGED

    @property
    def compute(self) -> torch.dtype:
        """The queries' dtype."""
        return BF16 if self.storage == FP8 else self.storage


LLAMA = KVShape(8, 128, 128)
CASES = (
    CheckCase("bf16, D128, group 4", LLAMA, 32),
    CheckCase("fp16, D128", LLAMA, 32, torch.float16),
    CheckCase("fp8, D128", LLAMA, 32, FP8),
    CheckCase("fp32, D64", KVShape(2, 64, 64), 6, torch.float32),
    CheckCase("bf16, D64, group 3", KVShape(3, 64, 64), 9),
    CheckCase("bf16, D80", KVShape(2, 80, 80), 8),
    CheckCase("bf16, D96, blocks of 64", KVShape(2, 96, 96), 8, block_size=64),
    CheckCase("bf16, K 192, V 128", KVShape(4, 192, 128), 4),
    CheckCase("bf16, D256, window, cap", KVShape(2, 256, 256), 4, window=500, softcap=50.0),
    CheckCase("bf16, window, sinks, blocks of 256", KVShape(2, 64, 64), 16, block_size=256, window=128, sinks=True),
    CheckCase("fp8, window, cap, sinks", LLAMA, 16, FP8, window=1000, softcap=30.0, sinks=True),
)
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, BF16: 1e-2}
"""|out - want| / |want|."""


def run_checks(
    backend: Any,
    device: str = "cuda",
    cases: tuple[CheckCase, ...] = CASES,
    long_lengths: tuple[int, ...] = (5, 300, 2000, 700),
) -> list[dict[str, Any]]:
    """A row per check: name, error or finding, ok. long_lengths: sequences that meet several splits.

    A check that raises is a row that says so: the others still tell where the fault is not.
    """
    checks: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        (case.name, partial(_against_oracle, backend, case, device)) for case in cases
    ]
    checks.append(("decode alone = in a batch, bits", partial(_alone_and_together, backend, device, long_lengths)))
    checks.append(("prompt whole = in chunks, bits", partial(_chunks_and_whole, backend, device)))
    checks.append(("torch.compile(fullgraph), bits", partial(_compiled, backend, device)))
    if device == "cuda":
        checks.append(("graph captured at length 1, bits", partial(_replayed, backend)))
    return [{"name": name} | _guarded(check) for name, check in checks]


def _guarded(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return check()
    except Exception as error:  # noqa: BLE001  whatever a compiler or a driver raises is what this run looks for
        return {"found": f"{type(error).__name__}: {error}"[:300], "ok": False}


def _world(
    backend: Any, case: CheckCase, device: str
) -> tuple[torch.Tensor, Any, AttentionBatch, Any, torch.Tensor | None]:
    """Query, poisoned cache with its history written, batch, the oracle's float64 cache, sinks."""
    generator = torch.Generator(device).manual_seed(7)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device)

    page = case.block_size
    needed = [-(-length // page) for _, length in case.sequences]
    num_blocks = sum(needed) + 2
    free = (torch.randperm(num_blocks - 1, generator=generator, device=device) + 1).tolist()
    tables = torch.full((len(needed), max(needed) + 1), 2**30, dtype=torch.int32)
    slots: list[torch.Tensor] = []
    for index, count in enumerate(needed):
        own = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int64)
        tables[index, :count] = own.to(torch.int32)
        slots.append((own[:, None] * page + torch.arange(page)).flatten()[: case.sequences[index][1]])
    options: dict[str, Any] = {"num_blocks": num_blocks, "block_size": page, "device": torch.device(device)}
    cache = backend.allocate(case.shape, dtype=case.storage, **options)
    cache.memory.view(torch.uint8).fill_(0x7F if case.storage == FP8 else 0xFF)
    every = torch.cat(slots).to(device)
    key = normal(every.shape[0], case.shape.num_kv_heads, case.shape.head_dim).to(case.compute)
    value = normal(every.shape[0], case.shape.num_kv_heads, case.shape.v_head_dim).to(case.compute)
    if cache.key_scales is not None:
        cache.key_scales.fill_(0.02)
        cache.value_scales.fill_(0.03)
    backend.write_kv(cache, key, value, every)
    oracle = make_reference().allocate(case.shape, dtype=torch.float64, **options)
    make_reference().write_kv(oracle, _held(key, cache.key_scales), _held(value, cache.value_scales), every)
    counts = torch.tensor([rows for rows, _ in case.sequences])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32)
    decodes = next((i for i, (rows, _) in enumerate(case.sequences) if rows != 1), len(case.sequences))
    total = int(starts[-1])
    batch = AttentionBatch(
        query_starts=starts.to(device),
        seq_lens=torch.tensor([length for _, length in case.sequences], dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        slot_mapping=torch.full((total,), -1, dtype=torch.int64, device=device),
        num_decodes=decodes,
        max_query_len=int(counts.max()),
        max_seq_len=max(length for _, length in case.sequences),
    )
    query = normal(total, case.heads, case.shape.head_dim).to(case.compute)
    return query, cache, batch, oracle, normal(case.heads) if case.sinks else None


def _held(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """What storage gives back of rows, float64."""
    if scales is None:
        return rows.double()
    return (rows.float() / scales[:, None]).clamp(-448.0, 448.0).to(FP8).double() * scales[:, None].double()


def _against_oracle(backend: Any, case: CheckCase, device: str) -> dict[str, Any]:
    query, cache, batch, oracle, sinks = _world(backend, case, device)
    features = {"sliding_window": case.window, "softcap": case.softcap, "sinks": sinks, "scale": query.shape[2] ** -0.5}
    out = backend.paged_attention(query, cache, batch, **features).double()
    want = make_reference().paged_attention(query.double(), oracle, batch, **features)
    error = float((out - want).norm() / want.norm())
    return {"error": error, "ok": error <= LIMITS[case.compute]}


def _alone_and_together(backend: Any, device: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    """A decode row's bits must not depend on its neighbours."""
    case = CheckCase("", KVShape(2, 64, 64), 8, sequences=tuple((1, length) for length in lengths))
    query, cache, batch, _, _ = _world(backend, case, device)
    together = backend.paged_attention(query, cache, batch, scale=0.125)
    same = True
    for index, (_, length) in enumerate(case.sequences):
        alone = _part(batch, index, batch.query_starts[:2], length)
        part = backend.paged_attention(query[index : index + 1], cache, alone, scale=0.125)
        same &= torch.equal(part, together[index : index + 1])
    return {"found": str(same), "ok": same}


def _chunks_and_whole(backend: Any, device: str) -> dict[str, Any]:
    """Does chunking change a prompt row's bits? Reported, not required: two loops may be contracted differently."""
    length = 200
    case = CheckCase("", KVShape(2, 64, 64), 8, sequences=((length, length),))
    query, cache, batch, _, _ = _world(backend, case, device)
    whole = backend.paged_attention(query, cache, batch, scale=0.125)
    pieces = []
    for first, last in ((0, 70), (70, 131), (131, length)):
        starts = torch.tensor([0, last - first], dtype=torch.int32, device=device)
        chunk = _part(batch, 0, starts, last)
        pieces.append(backend.paged_attention(query[first:last], cache, chunk, scale=0.125))
    same = torch.equal(torch.cat(pieces), whole)
    return {"found": str(same), "ok": True}


def _part(batch: AttentionBatch, index: int, starts: torch.Tensor, length: int) -> AttentionBatch:
    """One sequence of a batch, at a length."""
    rows = int(starts[-1])
    return AttentionBatch(
        query_starts=starts,
        seq_lens=torch.full_like(batch.seq_lens[:1], length),
        block_tables=batch.block_tables[index : index + 1],
        slot_mapping=batch.slot_mapping[:rows],
        num_decodes=int(rows == 1),
        max_query_len=rows,
        max_seq_len=length,
    )


def _replayed(backend: Any) -> dict[str, Any]:
    """A captured graph must read lengths and tables at replay, not at capture."""
    case = CheckCase("", KVShape(2, 64, 64), 8, sequences=((1, 900), (1, 600)))
    query, cache, batch, _, _ = _world(backend, case, "cuda")
    want = backend.paged_attention(query, cache, batch, scale=0.125)
    lengths = batch.seq_lens.clone()
    batch.seq_lens.fill_(1)
    backend.paged_attention(query, cache, batch, scale=0.125)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.paged_attention(query, cache, batch, scale=0.125)
    batch.seq_lens.copy_(lengths)
    graph.replay()
    same = torch.equal(out, want)
    return {"found": str(same), "ok": same}


def _compiled(backend: Any, device: str) -> dict[str, Any]:
    """fullgraph=True raises on a break."""
    case = CheckCase("", KVShape(2, 64, 64), 8, sequences=((1, 90), (3, 60)))
    query, cache, batch, _, _ = _world(backend, case, device)

    def step(rows: torch.Tensor) -> torch.Tensor:
        out = backend.paged_attention(rows * 1.0, cache, batch, scale=0.125).flatten(1)
        result: torch.Tensor = backend.silu_mul(backend.add_rms_norm(out, None, torch.ones_like(out[0]), epsilon=1e-6))
        return result

    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(step, fullgraph=True, backend="aot_eager")
    same = torch.equal(compiled(query), step(query))
    return {"found": str(same), "ok": same}
