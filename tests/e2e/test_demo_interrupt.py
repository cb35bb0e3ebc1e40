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


def is_there(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    ("line", "how"),
    [
        ("starting a local cluster", signal.SIGINT),
        ("llmdeployment.pagefleet.dev/smollm2 created", signal.SIGINT),
        ("starting the operator", signal.SIGHUP),
        ("starting the operator", "its output is closed"),
    ],
)
def test_ctrl_c_ends_the_demo_and_all_that_it_started(line: str, how: signal.Signals | str) -> None:
    """So does a terminal that is closed, and `make demo | head`, which once left a cluster running."""
    report = ROOT / "demo-report.json"
    before = report.stat().st_mtime_ns if report.exists() else None
    environment = os.environ | {"HOME": os.devnull}  # nor does it need a home that it can write to
    with subprocess.Popen(
        [sys.executable, "-m", "demo"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        assert demo.stdout is not None and demo.stderr is not None
        said = ""
        while line not in said:
            said += (newest := demo.stdout.readline())
            assert newest, said
        started = psutil.Process(demo.pid).children(recursive=True)
        if isinstance(how, signal.Signals):
            os.kill(demo.pid, how)
            assert demo.stdout.read().endswith("interrupted; nothing is left running\n")
        else:
            demo.stdout.close()
        assert demo.wait(100) == 1
        assert demo.stderr.read() == ""
    assert [process for process in started if is_there(process)] == []
    assert (report.stat().st_mtime_ns if report.exists() else None) == before, "an interrupted run is no result"
