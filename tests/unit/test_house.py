"""The layout's own rules: what must never be in the tree."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("operator", "server", "kernels", "localcluster", "simulator", "plugin")


def test_room_folders_hold_no_python_of_their_own() -> None:
    """`operator/__init__.py` or a loose module would shadow the standard library's `operator`."""
    loose = [str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).glob("*.py")]
    assert loose == []


def test_test_folders_are_no_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_standard_operator_is_not_shadowed() -> None:
    import operator

    assert operator.add(1, 2) == 3


def test_product_files_stay_under_400_lines() -> None:
    too_long = {
        str(path.relative_to(ROOT)): lines
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 400
    }
    assert too_long == {}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("command", sorted(PROJECT["scripts"]))
def test_every_command_says_its_version(command: str) -> None:
    started = [str(Path(sys.executable).with_name(command)), "--version"]
    done = subprocess.run(started, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split()[-1] == PROJECT["version"]
