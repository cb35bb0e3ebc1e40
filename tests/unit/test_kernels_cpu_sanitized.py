"""The CPU kernels' own tests once more, on libraries built with AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagefleet_kernels.cpu import build as build_module
from pagefleet_kernels.cpu.build import build, cache_dir, find_compiler
from pagefleet_kernels.cpu.isa import cpu_flags, supported_sets
from pagefleet_kernels.cpu.library import LIBRARY_VARIABLE
from pagefleet_kernels.errors import BackendUnavailable
from support.cpu_kernels import LEVELS

TESTS = Path(__file__).parent.parent
CORPUS = [
    TESTS / "unit/test_kernels_cpu_attention.py",
    TESTS / "unit/test_kernels_cpu_grouped.py",
    TESTS / "unit/test_kernels_cpu_linear.py",
    TESTS / "unit/test_kernels_cpu_rope.py",
    TESTS / "unit/test_kernels_cpu_program.py",
    TESTS / "unit/test_kernels_cpu_row_ops.py",
    TESTS / "property/test_kernels_cpu_one_arithmetic.py",
    TESTS / "property/test_kernels_cpu_sampler.py",
    TESTS / "property/test_kernels_hostile.py",
]
# A write past the end of the output: rows that the tensor does not have.
OVERFLOW = """
import ctypes, torch
from pagefleet_kernels.cpu.calls import GateCall
from pagefleet_kernels.cpu.library import find_library
x, out = torch.zeros(4, 64), torch.zeros(3, 32)
call = GateCall(x.data_ptr(), out.data_ptr(), 64, 4, 32, 0, 1, 1)
find_library().call("pagefleet_gate", ctypes.byref(call), 0)
"""


def sanitized(level_name: str) -> dict[str, str]:
    """Environment of a process that uses the sanitized library of a level."""
    level = next((level for level in supported_sets(cpu_flags()) if level.name == level_name), None)
    if level is None:
        pytest.skip(f"this CPU does not have {level_name}")
    try:
        compiler = find_compiler()
    except BackendUnavailable as error:
        pytest.skip(error.reason)
    if "clang" in compiler.version:
        pytest.skip("clang's sanitizers need clang's own process start-up")
    with pytest.MonkeyPatch.context() as patch:  # minutes where much else runs: late is no reason not to look
        patch.setattr(build_module, "BUILD_TIMEOUT_SECONDS", 1500.0)
        path = build(level, compiler, cache_dir(), sanitize=True)
    runtimes = [
        subprocess.run([compiler.path, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        for name in ("libasan.so", "libubsan.so")
    ]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": " ".join(done.stdout.strip() for done in runtimes),
        # Python and torch leave memory to the system at exit.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        LIBRARY_VARIABLE: str(path),
    }


@pytest.mark.long
@pytest.mark.timeout(7000)
@pytest.mark.parametrize("level", LEVELS)
def test_no_access_out_of_bounds_and_no_undefined_behaviour(level: str) -> None:
    environment = sanitized(level)
    canary = subprocess.run(
        [sys.executable, "-c", OVERFLOW], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert "heap-buffer-overflow" in canary.stderr, "the sanitizer does not see this process's memory"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not long",
        "-k",
        f"not {other(level)}",
    ]
    done = subprocess.run(
        [*command, *map(str, CORPUS)],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=5000,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 200, "most tests were skipped: " + done.stdout[-1000:]


def other(level: str) -> str:
    """The level whose library would not be the sanitized one."""
    return next(name for name in LEVELS if name != level)
