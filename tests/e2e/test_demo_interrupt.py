"""Ctrl-C while `make demo` runs: it ends at once, without a traceback, and nothing stays behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).resolve().parents[2]


def test_nothing_that_takes_time_is_loaded_before_ctrl_c_is_cared_for() -> None:
    """Ctrl-C in the demo's first second once printed the stack of whatever was being imported."""
    code = "import sys, demo.__main__; sys.exit('asyncio' in sys.modules or 'demo.main_job' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("line", ["starting a local cluster", "llmdeployment.pagefleet.dev/smollm2 created"])
def test_ctrl_c_ends_the_demo_and_all_that_it_started(line: str) -> None:
    report = ROOT / "demo-report.json"
    before = report.stat().st_mtime_ns if report.exists() else None
    with subprocess.Popen(
        [sys.executable, "-m", "demo"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as demo:
        assert demo.stdout is not None
        said = ""
        while line not in said:
            said += (newest := demo.stdout.readline())
            assert newest, said
        started = psutil.Process(demo.pid).children(recursive=True)
        os.kill(demo.pid, signal.SIGINT)
        rest, _ = demo.communicate(timeout=100)
    assert demo.returncode == 1
    assert rest.endswith("interrupted; nothing is left running\n"), said + rest
    assert "Traceback" not in rest
    assert [process for process in started if process.is_running()] == []
    assert (report.stat().st_mtime_ns if report.exists() else None) == before, "an interrupted run is no result"
