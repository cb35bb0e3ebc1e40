"""CPU kernels against torch and against what the machine itself does: one interleaved run, one table.

    python -m benchmarks.kernels_cpu [--threads N] [--rounds N] [--only decode,prefill,linear,rows] [--json FILE]

All contenders of a row, and the machine's own measure, run in turn within each round, so that whatever else the machine
does hits all of them; ratios are medians over rounds of quotients within a round, times are medians. Work bound by
memory goes through more data than the caches hold. With one thread, time is the thread's CPU time, which waiting for a
core does not show in; with more it is wall time. On a machine that others use too, ratios mean more than times: the
last line says how many cores other processes took.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# As in the engine: else torch's OpenMP threads spin for milliseconds after a call, in the next contender's time.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import torch
from torch.nn import functional

from benchmarks.serving.machine import CoreMeter, facts
from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.cpu.backend import CpuBackend
from pagefleet_kernels.cpu.library import find_library
from pagefleet_kernels.cpu.onednn import OneDnnPacker

CPU = torch.device("cpu")
Run = Callable[[], object]
COLD_BYTES = 96 << 20
"""Data that cold work goes through before it comes back to the same: three times a large L3."""
GROUPS = ("decode", "prefill", "linear", "rows")
ROUND_SECONDS = 0.0005
"""Within a round a contender runs until so much time has passed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    work: str
    ours_us: float
    rate: float
    unit: str
    of_machine: float
    """rate over the machine's: reading 96 MiB for GB/s, torch's product of two 1024^2 matrices for GF/s."""
    baseline: str
    ratio: float
    """How many times faster ours is."""


class Contender:
    """Something to time: the same work on one or more sets of data, taken in turn."""

    def __init__(self, name: str, variants: Sequence[Run]) -> None:
        self.name = name
        self._variants = itertools.cycle(variants)
        self.seconds: list[float] = []

    def time_once(self, clock: Callable[[], float]) -> None:
        """Append the mean seconds of a call. A first one, not counted, brings the code back into the caches."""
        next(self._variants)()
        count = 0
        start = clock()
        while True:
            next(self._variants)()
            count += 1
            elapsed = clock() - start
            if elapsed >= ROUND_SECONDS:
                self.seconds.append(elapsed / count)
                return

    def ratio_to(self, other: "Contender") -> float:
        """Median over rounds of this one's time over the other's."""
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))


class Bench:
    """Measures and collects rows."""

    def __init__(self, backend: CpuBackend, rounds: int) -> None:
        self.backend, self.rounds = backend, rounds
        self._clock = time.thread_time if backend.num_threads == 1 else time.perf_counter
        self.rows: list[Row] = []
        self._read = torch.ones(COLD_BYTES // 4)
        self._squares = {dtype: torch.randn(1024, 1024).to(dtype) for dtype in (torch.bfloat16, torch.float32)}

    def read(self) -> object:
        """The machine's own measure: 96 MiB, once."""
        return self._read.sum()

    def add(
        self, work: str, ours: Sequence[Run], baselines: Sequence[tuple[str, Sequence[Run]]], *, num_bytes: float
    ) -> None:
        """Work bound by memory: num_bytes are read or written by one call."""
        machine = Contender("read", [self.read])
        self._measure(work, ours, baselines, machine, num_bytes, self._read.nbytes, "GB/s")

    def add_compute(
        self,
        work: str,
        ours: Sequence[Run],
        baselines: Sequence[tuple[str, Sequence[Run]]],
        *,
        flops: float,
        dtype: torch.dtype,
    ) -> None:
        """Work bound by arithmetic: flops of one call."""
        square = self._squares[dtype]
        machine = Contender("product", [lambda: square @ square])
        self._measure(work, ours, baselines, machine, flops, 2.0 * 1024**3, "GF/s")

    def _measure(
        self,
        work: str,
        ours: Sequence[Run],
        baselines: Sequence[tuple[str, Sequence[Run]]],
        machine: Contender,
        amount: float,
        machine_amount: float,
        unit: str,
    ) -> None:
        own = Contender("ours", ours)
        others = [Contender(name, variants) for name, variants in baselines]
        for _ in range(self.rounds):
            for contender in (machine, own, *others):
                contender.time_once(self._clock)
        seconds = statistics.median(own.seconds)
        of_machine = machine.ratio_to(own) * amount / machine_amount
        for other in others:
            row = Row(work, seconds * 1e6, amount / seconds / 1e9, unit, of_machine, other.name, other.ratio_to(own))
            self.rows.append(row)
            print(_line(row), flush=True)


def copies_for(num_bytes: int) -> int:
    """How many copies of so much data no cache holds together."""
    return max(1, -(-COLD_BYTES // num_bytes))


def _line(row: Row) -> str:
    return (
        f"{row.work:<44} {row.ours_us:>10.0f} us {row.rate:>7.1f} {row.unit} {row.of_machine:>11.0%}"
        f"   {row.ratio:>6.2f}x {row.baseline}"
    )


def paged(
    backend: CpuBackend,
    shape: KVShape,
    heads: int,
    *,
    seqs: int,
    rows: int,
    length: int,
    dtype: torch.dtype,
    copies: int,
) -> list[Run]:
    """Calls of paged attention, each over its own `seqs` sequences of `length` in shuffled blocks: their last rows."""
    per_seq = -(-length // 16)
    num_blocks = copies * seqs * per_seq
    cache = backend.allocate(shape, num_blocks=1 + num_blocks, block_size=16, dtype=dtype, device=CPU)
    for block in range(1, 1 + num_blocks, 1024):
        slots = torch.arange(block * 16, min(block + 1024, 1 + num_blocks) * 16)
        key = torch.randn(len(slots), shape.num_kv_heads, shape.head_dim).to(dtype)
        backend.write_kv(cache, key, torch.randn(*key.shape[:2], shape.v_head_dim).to(dtype), slots)
    tables = (1 + torch.randperm(num_blocks)).view(copies, seqs, per_seq).to(torch.int32)
    query = torch.randn(seqs * rows, heads, shape.head_dim).to(dtype)

    def run(batch: AttentionBatch) -> torch.Tensor:
        return backend.paged_attention(query, cache, batch, scale=shape.head_dim**-0.5)

    batches = [
        AttentionBatch(
            query_starts=torch.arange(seqs + 1, dtype=torch.int32) * rows,
            seq_lens=torch.full((seqs,), length, dtype=torch.int32),
            block_tables=table,
            slot_mapping=torch.full((seqs * rows,), -1),
            num_decodes=seqs if rows == 1 else 0,
            max_query_len=rows,
            max_seq_len=length,
        )
        for table in tables
    ]
    return [functools.partial(run, batch) for batch in batches]


def recorded(
    backend: CpuBackend, shape: KVShape, heads: int, *, seqs: int, length: int, dtype: torch.dtype, layers: int
) -> Run:
    """The decodes of `layers` layers, each over its own KV, in one call, as a model's step runs them."""
    per_seq = -(-length // 16)
    num_blocks = 1 + seqs * per_seq
    program = backend.program(dtype=dtype, max_rows=seqs)
    query, out = (program.buffer(heads * width) for width in (shape.head_dim, shape.v_head_dim))
    query.normal_()
    slots = torch.arange(16, num_blocks * 16)
    for _ in range(layers):
        cache = backend.allocate(shape, num_blocks=num_blocks, block_size=16, dtype=dtype, device=CPU)
        key = torch.randn(len(slots), shape.num_kv_heads, shape.head_dim).to(dtype)
        backend.write_kv(cache, key, torch.randn(*key.shape[:2], shape.v_head_dim).to(dtype), slots)
        program.attention(
            query.view(seqs, heads, -1), cache, out, scale=shape.head_dim**-0.5, sliding_window=None, softcap=None
        )
    batch = AttentionBatch(
        query_starts=torch.arange(seqs + 1, dtype=torch.int32),
        seq_lens=torch.full((seqs,), length, dtype=torch.int32),
        block_tables=(1 + torch.randperm(num_blocks - 1)).view(seqs, per_seq).to(torch.int32),
        slot_mapping=torch.full((seqs,), -1),
        num_decodes=seqs,
        max_query_len=1,
        max_seq_len=length,
    )
    positions = torch.full((seqs,), length - 1)
    return lambda: program.run(batch, positions)


def bench_step(bench: Bench, dtype: torch.dtype, cases: Sequence[tuple[int, int, int, int, int]]) -> None:
    """Decoding as a step does it: no way back to Python between the layers, no thread asleep."""
    for seqs, length, heads, kv_heads, dim in cases:
        num_bytes = seqs * length * kv_heads * 2 * dim * dtype.itemsize
        layers = copies_for(num_bytes)
        run = recorded(
            bench.backend, KVShape(kv_heads, dim, dim), heads, seqs=seqs, length=length, dtype=dtype, layers=layers
        )
        work = f"{layers} layers of decode {seqs}x{length} {heads}/{kv_heads}x{dim} {_short(dtype)}"
        bench.add(work, [run], [("reading", [bench.read])], num_bytes=layers * num_bytes)


def bench_decode(bench: Bench, dtype: torch.dtype, cases: Sequence[tuple[int, int, int, int, int]]) -> None:
    """Baselines read contiguous K and V: the gather that they would need first is not even counted."""
    for seqs, length, heads, kv_heads, dim in cases:
        num_bytes = seqs * length * kv_heads * 2 * dim * dtype.itemsize
        copies = copies_for(num_bytes)
        query = torch.randn(seqs, kv_heads, heads // kv_heads, dim).to(dtype)
        pairs = [torch.randn(2, seqs, kv_heads, length, dim).to(dtype) for _ in range(copies)]

        def sdpa(pair: torch.Tensor, query: torch.Tensor = query) -> torch.Tensor:
            return functional.scaled_dot_product_attention(query, pair[0], pair[1])

        def matmul(pair: torch.Tensor, query: torch.Tensor = query, scale: float = dim**-0.5) -> torch.Tensor:
            return ((query @ pair[0].transpose(2, 3)) * scale).softmax(dim=-1) @ pair[1]

        shape = KVShape(kv_heads, dim, dim)
        bench.add(
            f"decode {seqs}x{length} {heads}/{kv_heads}x{dim} {_short(dtype)}",
            paged(bench.backend, shape, heads, seqs=seqs, rows=1, length=length, dtype=dtype, copies=copies),
            [
                ("SDPA, heads folded, contiguous", [functools.partial(sdpa, pair) for pair in pairs]),
                ("matmul, softmax, matmul, contiguous", [functools.partial(matmul, pair) for pair in pairs]),
            ],
            num_bytes=num_bytes,
        )


def bench_prefill(bench: Bench, dtype: torch.dtype, cases: Sequence[tuple[int, int, int, int]]) -> None:
    """Whole causal prompts; SDPA gets K and V expanded to the query heads, which is its fast path."""
    for length, heads, kv_heads, dim in cases:
        query, keys, values = (torch.randn(1, heads, length, dim).to(dtype) for _ in range(3))
        shape = KVShape(kv_heads, dim, dim)
        sdpa = functools.partial(functional.scaled_dot_product_attention, query, keys, values, is_causal=True)
        bench.add_compute(
            f"prefill {length} {heads}/{kv_heads}x{dim} {_short(dtype)}",
            paged(bench.backend, shape, heads, seqs=1, rows=length, length=length, dtype=dtype, copies=1),
            [("SDPA causal, contiguous", [sdpa])],
            flops=2 * heads * dim * length * (length + 1),
            dtype=dtype,
        )


def bench_linear(bench: Bench, dtype: torch.dtype, cases: Sequence[tuple[int, int]], row_counts: Sequence[int]) -> None:
    """A decode step reads each weight once: few rows go through cold copies of it. Many rows find it warm."""
    for outputs, inputs in cases:
        one = torch.randn(outputs, inputs).to(dtype)
        weights = [one.clone() for _ in range(copies_for(one.nbytes))]
        ours = [bench.backend.pack_linear(weight, None) for weight in weights]
        packer = OneDnnPacker()
        library = [packer.pack(weight, None) for weight in weights]
        for rows in row_counts:
            x = torch.randn(rows, inputs).to(dtype)
            few = rows <= 16
            work = f"linear {outputs}x{inputs}, {rows} rows {_short(dtype)}"
            count = len(weights) if few else 1
            own = [functools.partial(linear, x) for linear in ours[:count] if linear is not None]
            baselines: list[tuple[str, list[Run]]] = [
                ("F.linear", [functools.partial(functional.linear, x, weight) for weight in weights[:count]])
            ]
            prepacked: list[Run] = [functools.partial(linear, x) for linear in library[:count] if linear is not None]
            if prepacked:
                baselines.append(("oneDNN prepacked", prepacked))
            if few:
                bench.add(work, own, baselines, num_bytes=one.nbytes)
            else:
                bench.add_compute(work, own, baselines, flops=2.0 * rows * one.numel(), dtype=dtype)


def bench_rows(bench: Bench, dtype: torch.dtype, rows: int, width: int) -> None:
    """Row-wise ops against eager torch; activations are warm."""
    ops = bench.backend.row_ops
    x, residual, weight = (torch.randn(rows, width).to(dtype) for _ in range(3))
    gate_up = torch.randn(rows, 8 * width).to(dtype)

    def norm() -> torch.Tensor:
        hidden = (residual + x).float()
        return (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype) * weight[0]

    def gated() -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return functional.silu(gate) * up

    bench.add(
        f"add + RMSNorm {rows}x{width} {_short(dtype)}",
        [lambda: ops.add_rms_norm(x, residual, weight[0], epsilon=1e-5)],
        [("torch eager", [norm])],
        num_bytes=4 * x.nbytes,
    )
    bench.add(
        f"SiLU * up {rows}x{4 * width} {_short(dtype)}",
        [lambda: ops.gated(gate_up)],
        [("torch eager", [gated])],
        num_bytes=1.5 * gate_up.nbytes,
    )


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads of ours and of torch, >= 1 (default 1)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each row, >= 1 (default 15)")
    parser.add_argument("--only", default="", help="groups of rows: decode, prefill, linear, rows (default all)")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    groups = {name for name in arguments.only.split(",") if name} or set(GROUPS)
    if unknown := groups - set(GROUPS):
        parser.error(f"--only: {', '.join(sorted(unknown))}; known are {', '.join(GROUPS)}")
    library = find_library()
    about = facts() | {"level": library.level.name, "torch": torch.__version__, "threads": arguments.threads}
    print("  ".join(f"{name}: {value}" for name, value in about.items()))

    meter = CoreMeter(0)
    bench = Bench(CpuBackend(library), arguments.rounds)
    bf16, fp32 = torch.bfloat16, torch.float32
    print(f"{'':<44} {'ours':>13} {'rate':>12} {'of machine':>11}   faster than\n")
    if "decode" in groups:
        small = [(seqs, 1024, 9, 3, 64) for seqs in (1, 8, 32)]
        bench_step(bench, bf16, small[:2])
        bench_decode(bench, bf16, [*small, (1, 4096, 32, 8, 128), (8, 4096, 32, 8, 128)])
        bench_decode(bench, fp32, small[1:])
    if "prefill" in groups:
        bench_prefill(bench, bf16, [(256, 9, 3, 64), (1024, 9, 3, 64), (1024, 32, 8, 128)])
        bench_prefill(bench, fp32, [(1024, 9, 3, 64)])
    if "linear" in groups:
        bench_linear(bench, bf16, [(960, 576), (3072, 576), (576, 1536), (2048, 2048)], [1, 2, 4, 8, 16, 64, 256])
        bench_linear(bench, bf16, [(49152, 576)], [1, 8])
        bench_linear(bench, fp32, [(3072, 576)], [1, 8, 64])
    if "rows" in groups:
        bench_rows(bench, bf16, 1, 576)
        bench_rows(bench, bf16, 256, 576)
    others, _, _ = meter.read()
    print(f"\nother processes took {others:.2f} of {os.cpu_count()} cores while this ran")
    if arguments.json is not None:
        result = {**about, "other_processes_cores": round(others, 2)}
        arguments.json.write_text(json.dumps({**result, "rows": [asdict(row) for row in bench.rows]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
