"""The GPU kernels: build, check against float64, time, compare. One call, unattended, within three minutes on an H200.

    python benchmarks/kernels_gpu.py [--out table.json] [--sweep] [--seconds N]

Bandwidth is held against a measured copy, arithmetic against a measured cuBLAS product, attention against
torch.nn.functional.scaled_dot_product_attention (FlashAttention-2 and cuDNN) over contiguous KV of the same size, which
has no paging to pay for, and against the other paged backends that are installed. What raises becomes a row that says
so; every row is printed and written when it is there. Without a CUDA device it says "not measured", lists the work and
its floor, and exits 0.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT)]

from benchmarks import gpu_baselines  # noqa: E402
from benchmarks.gpu_checks import run_checks  # noqa: E402
from benchmarks.gpu_neighbours import Neighbour, neighbours  # noqa: E402
from benchmarks.gpu_timing import DEVICE, Timing, copy_bandwidth, matmul_rate, rotations, time_graph  # noqa: E402
from benchmarks.gpu_works import FULL, Scale, Work, call, make_scene  # noqa: E402
from pagefleet_kernels.errors import BackendUnavailable  # noqa: E402

TIME_BUDGET_SECONDS = 170.0
"""Rows that would start later are reported as skipped."""
OF_COPY = 0.80
OF_CUDNN = 0.60
FP8_GAIN = 1.6
"""Targets: elementwise work against the copy, prompts against cuDNN, tokens/s of fp8 KV against bf16's."""


class Report:
    """The table as it grows. A run that dies, or is cut, leaves all that it found."""

    def __init__(self, path: Path | None, seconds: float) -> None:
        """path: where the table is written as JSON after every row; None: only printed."""
        self.table: dict[str, Any] = {"machine": _machine(), "skipped": []}
        self._path, self._began, self._seconds = path, time.monotonic(), seconds
        print(self.table["machine"], flush=True)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def add(self, section: str, name: str, step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The row of one step, or why there is none."""
        if self.elapsed > self._seconds:
            self.table["skipped"].append(f"{section}: {name}")
            self.write()
            return {}
        try:
            row = {"name": name} | step()
        except Exception as error:  # noqa: BLE001  a compiler's or a driver's: the rows after it still count
            row = {"name": name, "failed": f"{type(error).__name__}: {error}"[:300]}
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        self.take(section, [row])
        return row

    def take(self, section: str, rows: list[dict[str, Any]]) -> None:
        """Print and keep rows."""
        self.table.setdefault(section, []).extend(rows)
        for row in rows:
            print(_shown(row), flush=True)
        self.write()

    def write(self) -> None:
        """The whole table so far."""
        self.table["seconds"] = self.elapsed
        if self._path:
            self._path.write_text(json.dumps(self.table, indent=1), encoding="utf-8")

    @property
    def failed(self) -> list[str]:
        """Rows that raised, and checks that found a fault. A missed target is none."""
        rows = [row for section in self.table.values() if isinstance(section, list) for row in section]
        return [row["name"] for row in rows if isinstance(row, dict) and ("failed" in row or not row.get("ok", True))]


def run(backend: Any, scale: Scale, report: Report, *, swept: bool) -> None:
    """All sections."""
    report.take("checks", run_checks(backend, DEVICE.type, scale.checks, scale.check_lengths))
    ceilings = {
        "copy GB/s": report.add("ceilings", "copy", lambda: {"found": copy_bandwidth(scale.copy_bytes)}).get("found"),
        "cuBLAS TFLOP/s": report.add("ceilings", "cuBLAS", lambda: {"found": matmul_rate(scale.matmul_width)}).get(
            "found"
        ),
    }
    for work in (*scale.decodes, *scale.prefills):
        report.add("attention", work.name, partial(attention_row, backend, work, ceilings, scale.most_buffers))
    for neighbour in neighbours(backend, scale.neighbours):
        report.add("neighbours", neighbour.name, partial(neighbour_row, neighbour, ceilings))
    times = {row["name"]: row.get("us") for row in report.table.get("attention", ())}
    for name in scale.fp8_gains:
        report.add("fp8", name, partial(gain_row, times, name))
    if swept:
        from benchmarks.gpu_sweep import sweep_steps

        for name, step in sweep_steps(backend, scale):
            report.add("sweep", name, step)


def attention_row(backend: Any, work: Work, ceilings: dict[str, float | None], most_buffers: int) -> dict[str, Any]:
    """Ours, and the same work by others."""
    scenes = [make_scene(backend, work, seed=seed) for seed in range(rotations(work.kv_bytes, most_buffers))]
    ours = time_graph([partial(call, backend, work, scene) for scene in scenes])
    del scenes
    others = {name: gpu_baselines.contiguous(work, name, most_buffers) for name in gpu_baselines.CONTIGUOUS}
    others |= {name: gpu_baselines.paged(work, name, most_buffers) for name in gpu_baselines.PAGED}
    row: dict[str, Any] = {"us": ours.microseconds, "spread": ours.spread}
    met = []
    if work.rows == 1:
        row["GB/s"] = work.kv_bytes / ours.microseconds / 1e3
        row["of copy"] = _share(row["GB/s"], ceilings.get("copy GB/s"))
        if work.floor_ratio is not None and row["of copy"] is not None:
            row["target"] = f"of copy >= {work.floor_ratio}"
            met.append(row["of copy"] >= work.floor_ratio)
    else:
        row["TFLOP/s"] = work.flops / ours.microseconds / 1e6
        row["of cuBLAS"] = _share(row["TFLOP/s"], ceilings.get("cuBLAS TFLOP/s"))
        if work.target_tflops is not None:
            row["target"] = f"TFLOP/s >= {work.target_tflops:g}, of cuDNN >= {OF_CUDNN}"
            met.append(row["TFLOP/s"] >= work.target_tflops)
            cudnn = others["cuDNN"]
            if isinstance(cudnn, Timing):
                row["of cuDNN"] = cudnn.microseconds / ours.microseconds
                met.append(row["of cuDNN"] >= OF_CUDNN)
    if met:
        row["met"] = all(met)
    for name, result in others.items():
        row[f"{name} us"] = result.microseconds if isinstance(result, Timing) else result
    return row


def neighbour_row(neighbour: Neighbour, ceilings: dict[str, float | None]) -> dict[str, Any]:
    """Ours, against the copy, and torch's way."""
    bytes_moved, ours, theirs = neighbour.build()
    timing = time_graph(ours)
    row: dict[str, Any] = {"us": timing.microseconds, "spread": timing.spread}
    if bytes_moved:
        row["GB/s"] = bytes_moved / timing.microseconds / 1e3
        row["of copy"] = _share(row["GB/s"], ceilings.get("copy GB/s"))
        if row["of copy"] is not None:
            row["target"], row["met"] = f"of copy >= {OF_COPY}", row["of copy"] >= OF_COPY
    if theirs:
        row["torch us"] = time_graph(theirs).microseconds
    return row


def gain_row(times: dict[str, float | None], name: str) -> dict[str, Any]:
    """Tokens/s of fp8 KV over bf16's."""
    plain, small = times.get(name), times.get(f"{name} fp8")
    if plain is None or small is None:
        return {"gain": "not measured"}
    return {"gain": plain / small, "target": f">= {FP8_GAIN}", "met": plain / small >= FP8_GAIN}


def _share(value: float, ceiling: float | None) -> float | None:
    return value / ceiling if ceiling else None


def _shown(row: dict[str, Any]) -> str:
    cells = []
    for name, value in row.items():
        if name == "name":
            continue
        text = f"{value:.3g}" if isinstance(value, float) and abs(value) < 10 else value
        cells.append(f"{name} {text:.0f}" if isinstance(text, float) else f"{name} {text}")
    return f"{row['name']:34s} " + " | ".join(cells)


def _machine() -> dict[str, str]:
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
    for work in (*FULL.decodes, *FULL.prefills):
        floor = max(work.kv_bytes / 4300e3, work.flops / 790e6)
        print(f"{work.name:34s} KV {work.kv_bytes / 1e6:7.1f} MB, {work.flops / 1e9:8.1f} GFLOP, floor {floor:7.1f} us")


def main() -> int:
    """Run; exit 1 when a check fails or a row raises (a missed speed target is no failure)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the table as JSON, after every row")
    parser.add_argument("--sweep", action="store_true", help="also try other configurations (minutes more)")
    parser.add_argument("--seconds", type=float, default=TIME_BUDGET_SECONDS, help="start no row later (default 170)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        not_measured()
        return 0
    from pagefleet_kernels.triton import make_backend

    try:
        backend = make_backend()
    except BackendUnavailable as error:
        print(f"not measured: {error.reason}")
        return 0
    report = Report(options.out, options.seconds)
    run(backend, FULL, report, swept=options.sweep)
    report.write()
    print(
        f"{report.elapsed:.0f} s; skipped: {report.table['skipped'] or 'nothing'}; failed: {report.failed or 'nothing'}"
    )
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
