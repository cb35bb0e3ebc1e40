"""The end-to-end benchmark for GPUs where there is none: it says so; its stages run on the CPU with a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_e2e, gpu_e2e_stages
from benchmarks.gpu_e2e_setting import Facts, Setting, StageFailedError
from benchmarks.gpu_e2e_stages import STAGES

SCRIPT = Path(gpu_e2e.__file__)
TINY = Setting("cpu", tiny=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: it would measure")
def test_says_not_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--out", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("not measured: no CUDA device")
    found = json.loads(report.read_text())
    assert (found["not_measured"], found["stages"]) == ("no CUDA device", {})


def test_decode_compares_graphs_with_eager_steps() -> None:
    facts = STAGES["decode"](TINY)
    assert facts["decode_4"]["same_tokens"] == 1.0
    assert facts["kv_bytes"] > 0


def test_paged_runs_more_at_once_than_static() -> None:
    facts = STAGES["paged_against_static"](TINY)
    assert facts["static"]["peak_running"] == facts["static_slots"] < facts["paged"]["peak_running"]
    assert facts["paged"]["steps"] < facts["static"]["steps"]


def test_a_stage_in_a_process_of_its_own_comes_back() -> None:
    result = gpu_e2e.run_apart("environment", TINY, 120)
    assert result["ok"]
    assert result["facts"]["torch"] == torch.__version__
    assert "environment" in gpu_e2e.line_of("environment", result)


def test_a_stage_that_takes_too_long_is_ended() -> None:
    result = gpu_e2e.run_apart("environment", TINY, 0.2)
    assert not result["ok"]
    assert "ended after" in result["error"]


@pytest.mark.timeout(60)
def test_a_late_stage_is_ended_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its output ends only when the process that it started, which holds it too, has ended."""
    script = tmp_path / "stage.py"
    script.write_text(
        "import subprocess, sys\n"
        "print('RESULT {\"ok\": true}', flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
    )
    monkeypatch.setattr(gpu_e2e, "__file__", str(script))
    assert gpu_e2e.run_apart("environment", TINY, 3)["ok"]  # what it had found stays


def test_whatever_a_stage_raises_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(setting: Setting) -> Facts:
        raise RuntimeError("an illegal memory access was encountered")

    def differs(setting: Setting) -> Facts:
        raise StageFailedError("other tokens than transformers: fused", {"fused_equal": 3})

    monkeypatch.setattr(gpu_e2e, "STAGES", {"a": breaks, "b": differs})
    broken, different = (gpu_e2e.run_here(name, TINY) for name in ("a", "b"))
    assert broken["error"] == "RuntimeError: an illegal memory access was encountered"
    assert "in breaks" in broken["trace"]
    assert different["facts"] == {"fused_equal": 3}
    assert "FAILED" in gpu_e2e.line_of("b", different)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_e2e_stages, "PACKAGES", ("torch", "no_such_package"))
    with pytest.raises(StageFailedError, match="missing: no_such_package; pip install"):
        STAGES["environment"](TINY)


@pytest.mark.long
def test_the_whole_of_it_passes_on_a_cpu(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--out", str(report)]
    subprocess.run(command, timeout=600, check=True)
    stages = json.loads(report.read_text())["stages"]
    assert list(stages) == list(STAGES)
    assert stages["parity"]["facts"]["fused_equal"] == stages["parity"]["facts"]["prompts"]
    assert stages["server"]["facts"]["output_tokens"] > 0


@pytest.mark.gpu
def test_measures_within_eight_minutes(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "report.json")]
    assert subprocess.run(command, timeout=480, check=False).returncode == 0
