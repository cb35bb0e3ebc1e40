"""The GPU kernels: build, check against float64, time, compare. One call, within three minutes on an H200.

    python benchmarks/kernels_gpu.py [--out table.json] [--sweep]

Bandwidth is held against a measured copy, arithmetic against a measured cuBLAS product, attention against
torch.nn.functional.scaled_dot_product_attention (FlashAttention-2 and cuDNN) over contiguous KV of the same size, which
has no paging to pay for. Without a CUDA device it says "not measured", lists the work and its floor, and exits 0.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]

from benchmarks.gpu_timing import Timing, copy_bandwidth, matmul_rate, rotations, time_graph  # noqa: E402
from pagefleet_kernels.batch import AttentionBatch, KVShape  # noqa: E402
from pagefleet_kernels.errors import BackendUnavailable  # noqa: E402

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
HEADS, KV_HEADS = 32, 8
FILL_BLOCKS = 16384
"""Filled at a time, to bound the random numbers held."""
TIME_BUDGET_SECONDS = 170.0
"""Rows that would start later are reported as skipped."""


@dataclass(frozen=True, slots=True)
class Work:
    """One attention call: sequences of equal length, rows each."""

    name: str
    sequences: int
    rows: int
    length: int
    head_dim: int = 128
    storage: torch.dtype = BF16
    floor_ratio: float | None = None
    """Target: share of measured copy bandwidth (decode), or None."""
    target_tflops: float | None = None

    @property
    def kv_bytes(self) -> int:
        """What a call must read at least."""
        return self.sequences * self.length * KV_HEADS * 2 * self.head_dim * self.storage.itemsize

    @property
    def flops(self) -> float:
        """Multiplications and additions under the causal mask."""
        pairs = self.rows * (self.length - self.rows) + self.rows * (self.rows + 1) / 2
        return 4.0 * self.sequences * HEADS * self.head_dim * pairs


DECODES = (
    Work("decode 1 x 1k", 1, 1, 1024),
    Work("decode 1 x 8k", 1, 1, 8192),
    Work("decode 1 x 128k", 1, 1, 131072, floor_ratio=0.85),
    Work("decode 8 x 4k", 8, 1, 4096, floor_ratio=0.60),
    Work("decode 32 x 4k", 32, 1, 4096, floor_ratio=0.85),
    Work("decode 128 x 4k", 128, 1, 4096, floor_ratio=0.85),
    Work("decode 256 x 1k", 256, 1, 1024, floor_ratio=0.85),
    Work("decode 64 x 4k D64", 64, 1, 4096, head_dim=64, floor_ratio=0.85),
    Work("decode 32 x 4k fp8", 32, 1, 4096, storage=FP8),
    Work("decode 128 x 4k fp8", 128, 1, 4096, storage=FP8),
)
PREFILLS = (
    Work("prefill 1 x 4k", 1, 4096, 4096, target_tflops=350),
    Work("prefill 1 x 16k", 1, 16384, 16384, target_tflops=350),
    Work("prefill 4 x 4k", 4, 4096, 4096, target_tflops=350),
    Work("prefill 512 after 8k", 4, 512, 8704),
    Work("prefill 1 x 8k D64", 1, 8192, 8192, head_dim=64, target_tflops=280),
    Work("prefill 1 x 8k fp8 KV", 1, 8192, 8192, storage=FP8),
)


@dataclass(frozen=True, slots=True)
class Scene:
    """Tensors of one call."""

    query: torch.Tensor
    cache: Any
    batch: AttentionBatch


def make_scene(backend: Any, work: Work, *, seed: int, block_size: int = 16) -> Scene:
    """Random data; blocks of every sequence scattered over the pool."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = KVShape(num_kv_heads=KV_HEADS, head_dim=work.head_dim, v_head_dim=work.head_dim)
    blocks = -(-work.length // block_size)
    total = work.sequences * blocks + 1
    device = torch.device("cuda")
    cache = backend.allocate(shape, num_blocks=total, block_size=block_size, dtype=work.storage, device=device)
    for memory in (cache.keys, cache.values):
        for part in memory.split(FILL_BLOCKS):
            part.copy_(torch.randn(part.shape, generator=generator, device="cuda", dtype=BF16).to(work.storage))
    rows = work.sequences * work.rows
    order = torch.randperm(total - 1, generator=generator, device="cuda") + 1
    batch = AttentionBatch(
        query_starts=torch.arange(0, rows + 1, work.rows, dtype=torch.int32, device="cuda"),
        seq_lens=torch.full((work.sequences,), work.length, dtype=torch.int32, device="cuda"),
        block_tables=order.view(work.sequences, blocks).to(torch.int32),
        slot_mapping=torch.full((rows,), -1, dtype=torch.int64, device="cuda"),
        num_decodes=work.sequences if work.rows == 1 else 0,
        max_query_len=work.rows,
        max_seq_len=work.length,
    )
    query = torch.randn(rows, HEADS, work.head_dim, generator=generator, device="cuda", dtype=BF16)
    return Scene(query=query, cache=cache, batch=batch)


def call(backend: Any, work: Work, scene: Scene, **features: Any) -> torch.Tensor:
    """One attention call."""
    out: torch.Tensor = backend.paged_attention(
        scene.query, scene.cache, scene.batch, scale=work.head_dim**-0.5, **features
    )
    return out


def check(backend: Any) -> list[dict[str, Any]]:
    """Relative errors against the plain backend in float64, ragged and featureful; poisoned slots; equal bits."""
    from benchmarks.gpu_checks import run_checks

    return run_checks(backend)


def baseline(work: Work, kind: SDPBackend) -> Timing | str:
    """scaled_dot_product_attention over contiguous KV; the reason where that backend refuses."""
    if work.rows != 1 and work.rows != work.length:
        return "no causal chunk there"
    shape = (work.sequences, KV_HEADS, work.length, work.head_dim)
    count = rotations(work.kv_bytes if work.storage == BF16 else 2 * work.kv_bytes)
    try:
        keys = [torch.randn(shape, device="cuda", dtype=BF16) for _ in range(count)]
        values = [torch.randn(shape, device="cuda", dtype=BF16) for _ in range(count)]
        query = torch.randn(work.sequences, HEADS, work.rows, work.head_dim, device="cuda", dtype=BF16)

        def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                query, k, v, is_causal=work.rows > 1, enable_gqa=True
            )

        with sdpa_kernel(kind):
            return time_graph([partial(attend, k, v) for k, v in zip(keys, values, strict=True)])
    except RuntimeError as error:
        return str(error).splitlines()[0][:60]


def torch_varlen(work: Work) -> Timing | str:
    """torch's own paged attention, blocks of 256; the reason where this torch or the work has none."""
    if work.storage == FP8:
        return "no fp8 there"
    from pagefleet_kernels.varlen import make_backend

    try:
        backend = make_backend()
        scenes = [make_scene(backend, work, seed=seed, block_size=256) for seed in range(rotations(work.kv_bytes))]
        return time_graph([partial(call, backend, work, scene) for scene in scenes])
    except BackendUnavailable as error:
        return error.reason
    except RuntimeError as error:
        return str(error).splitlines()[0][:60]


def measure(backend: Any, work: Work, ceilings: dict[str, float]) -> dict[str, Any]:
    """One row of the attention table."""
    scenes = [make_scene(backend, work, seed=seed) for seed in range(rotations(work.kv_bytes))]
    ours = time_graph([partial(call, backend, work, scene) for scene in scenes])
    row: dict[str, Any] = {"name": work.name, "us": ours.microseconds, "spread": ours.spread}
    if work.rows == 1:
        row["GB/s"] = work.kv_bytes / ours.microseconds / 1e3
        row["of copy"] = row["GB/s"] / ceilings["copy GB/s"]
        if work.floor_ratio is not None:
            row["target"] = f"of copy >= {work.floor_ratio}"
            row["met"] = row["of copy"] >= work.floor_ratio
    else:
        row["TFLOP/s"] = work.flops / ours.microseconds / 1e6
        row["of cuBLAS"] = row["TFLOP/s"] / ceilings["cuBLAS TFLOP/s"]
        if work.target_tflops is not None:
            row["target"] = f"TFLOP/s >= {work.target_tflops:g}"
            row["met"] = row["TFLOP/s"] >= work.target_tflops
    del scenes
    for name, kind in (("FA2", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        result = baseline(work, kind)
        row[f"{name} us"] = result.microseconds if isinstance(result, Timing) else result
    result = torch_varlen(work)
    row["torch varlen us"] = result.microseconds if isinstance(result, Timing) else result
    torch.cuda.empty_cache()
    return row


def measure_neighbours(backend: Any, ceilings: dict[str, float]) -> list[dict[str, Any]]:
    """Norm, gate, rotation and write, sampler."""
    from benchmarks.gpu_neighbours import neighbour_calls

    rows = []
    for name, bytes_moved, ours, theirs in neighbour_calls(backend):
        timing = time_graph(ours)
        row: dict[str, Any] = {"name": name, "us": timing.microseconds, "spread": timing.spread}
        if bytes_moved:
            row["GB/s"] = bytes_moved / timing.microseconds / 1e3
            row["of copy"] = row["GB/s"] / ceilings["copy GB/s"]
            row["target"], row["met"] = "of copy >= 0.8", row["of copy"] >= 0.8
        if theirs:
            row["torch us"] = time_graph(theirs).microseconds
        rows.append(row)
    return rows


def sweep(backend: Any) -> list[dict[str, Any]]:
    """Decode split sizes, tiles and stages beside the table's choice; prefill tiles and warps."""
    from benchmarks.gpu_sweep import run_sweep

    return run_sweep(lambda work, seed: make_scene(backend, work, seed=seed), DECODES, PREFILLS)


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows, each with its own columns."""
    for row in rows:
        cells = []
        for name, value in row.items():
            if name == "name":
                continue
            text = f"{value:.3g}" if isinstance(value, float) and abs(value) < 1 else value
            cells.append(f"{name} {text:.0f}" if isinstance(text, float) else f"{name} {text}")
        print(f"{row['name']:34s} " + " | ".join(cells), flush=True)


def machine() -> dict[str, str]:
    """Where and what."""
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    facts = {
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        import triton

        facts |= {"device": torch.cuda.get_device_name(), "triton": triton.__version__}
    return facts


def not_measured() -> None:
    """What would be measured, and the least time it can take on an H200."""
    print("not measured: no CUDA device")
    print("floors on an H200 (4300 GB/s copied, 790 TFLOP/s multiplied, as measured elsewhere):")
    for work in (*DECODES, *PREFILLS):
        floor = max(work.kv_bytes / 4300e3, work.flops / 790e6)
        print(f"{work.name:34s} KV {work.kv_bytes / 1e6:7.1f} MB, {work.flops / 1e9:8.1f} GFLOP, floor {floor:7.1f} us")


def main() -> int:
    """Run; exit 1 when a check fails (a missed speed target is no failure)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    parser.add_argument("--sweep", action="store_true", help="also try other configurations (minutes more)")
    options = parser.parse_args()
    began = time.monotonic()
    if not torch.cuda.is_available():
        not_measured()
        return 0
    from pagefleet_kernels.triton import make_backend

    try:
        backend = make_backend()
    except BackendUnavailable as error:
        print(f"not measured: {error.reason}")
        return 0
    table: dict[str, Any] = {"machine": machine()}
    print(table["machine"], flush=True)
    table["checks"] = check(backend)
    show(table["checks"])
    table["ceilings"] = {"copy GB/s": copy_bandwidth(), "cuBLAS TFLOP/s": matmul_rate()}
    print(table["ceilings"], flush=True)
    table["attention"], table["skipped"] = [], []

    def rows_of(works: tuple[Work, ...], step: Callable[[Work], dict[str, Any]]) -> None:
        for work in works:
            if time.monotonic() - began > TIME_BUDGET_SECONDS:
                table["skipped"].append(work.name)
                continue
            table["attention"].append(step(work))
            show(table["attention"][-1:])

    rows_of(DECODES + PREFILLS, lambda work: measure(backend, work, table["ceilings"]))
    table["neighbours"] = measure_neighbours(backend, table["ceilings"])
    show(table["neighbours"])
    by_name = {row["name"]: row for row in table["attention"]}
    for size in ("32 x 4k", "128 x 4k"):
        if {f"decode {size}", f"decode {size} fp8"} <= by_name.keys():
            gain = by_name[f"decode {size}"]["us"] / by_name[f"decode {size} fp8"]["us"]
            print(f"fp8 over bf16, decode {size}: {gain:.2f}x tokens/s (target 1.6)")
    if options.sweep:
        table["sweep"] = sweep(backend)
        show(table["sweep"])
    table["seconds"] = time.monotonic() - began
    print(f"{table['seconds']:.0f} s; skipped: {table['skipped'] or 'nothing'}")
    if options.out:
        options.out.write_text(json.dumps(table, indent=1), encoding="utf-8")
    return 0 if all(row["ok"] for row in table["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
