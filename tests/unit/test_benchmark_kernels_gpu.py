"""The GPU benchmark where there is no GPU: it says so, and all of it runs under Triton's interpreter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import triton_benchmark_work as work
from support.triton_interpreter import Interpreter, interpreter

__all__ = ["interpreter"]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: it would measure")
def test_says_not_measured() -> None:
    script = ROOT / "benchmarks" / "kernels_gpu.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("not measured: no CUDA device")
    assert "decode 32 x 4k" in done.stdout


def test_every_section_runs(interpreter: Interpreter, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    assert interpreter.run(work.benchmark_run, str(path)) == []
    table = json.loads(path.read_text(encoding="utf-8"))
    assert all(row["error"] > 0 for row in table["checks"] if "error" in row)
    assert table["skipped"] == []
    sizes = {name: len(rows) for name, rows in table.items() if isinstance(rows, list)}
    assert sizes == {
        "skipped": 0, "checks": 6, "ceilings": 2, "attention": 4, "neighbours": 12, "fp8": 1, "sweep": 17,
    }  # fmt: skip
    assert all("of copy" in row for row in table["attention"] if row["name"].startswith("decode"))
    assert all("of cuBLAS" in row and "FA2 us" in row for row in table["attention"] if row["name"] == "prefill")


def test_what_raises_is_a_row_and_the_rest_still_runs(interpreter: Interpreter, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    failed = interpreter.run(work.benchmark_run, str(path), broken=("paged_attention",))
    table = json.loads(path.read_text(encoding="utf-8"))
    assert {"fp32", "decode", "prefill"} <= set(failed)
    assert all("out of memory" in row["failed"] for row in table["attention"])
    assert all("us" in row for row in table["neighbours"])
    assert table["fp8"] == [{"name": "decode", "gain": "not measured"}]


def test_rows_beyond_the_budget_are_named(interpreter: Interpreter, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    interpreter.run(work.benchmark_run, str(path), seconds=-1.0)
    table = json.loads(path.read_text(encoding="utf-8"))
    assert "attention" not in table
    assert "attention: prefill" in table["skipped"]


@pytest.mark.gpu
def test_measures_within_three_minutes(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "kernels_gpu.py"
    done = subprocess.run([sys.executable, str(script), "--out", str(tmp_path / "t.json")], timeout=240, check=False)
    assert done.returncode == 0
