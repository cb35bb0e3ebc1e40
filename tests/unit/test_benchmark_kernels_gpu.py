"""The GPU benchmark where there is no GPU: it says so, and what it would check is right."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import triton_work as work
from support.triton_interpreter import Interpreter, interpreter

__all__ = ["interpreter"]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: it would measure")
def test_says_not_measured() -> None:
    script = ROOT / "benchmarks" / "kernels_gpu.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("not measured: no CUDA device")
    assert "decode 32 x 4k" in done.stdout


def test_its_checks_pass_and_can_fail(interpreter: Interpreter) -> None:
    rows = interpreter.run(work.benchmark_checks)
    assert [row["name"] for row in rows if not row["ok"]] == []
    assert all(row["error"] > 0 for row in rows if "error" in row)


@pytest.mark.gpu
def test_measures_within_three_minutes(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "kernels_gpu.py"
    done = subprocess.run([sys.executable, str(script), "--out", str(tmp_path / "t.json")], timeout=240, check=False)
    assert done.returncode == 0
