"""The operator's image: `pip install '.[operator]'` alone, in a clean venv."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.e2e
def test_operator_extra_installs_without_torch_and_runs(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*install, "-c", str(ROOT / "constraints.txt"), f"{ROOT}[operator]"], check=True, cwd=tmp_path, timeout=240
    )
    listing = subprocess.run(
        [str(python), "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    names = {line.split("==")[0].lower() for line in listing.splitlines()}
    assert "kopf" in names
    assert names & {"torch", "transformers", "triton", "numpy", "safetensors"} == set()
    helped = subprocess.run(
        [str(tmp_path / "venv" / "bin" / "pagefleet-operator"), "--help"], capture_output=True, text=True, timeout=60
    )
    assert helped.returncode == 0, helped.stderr
    assert "--namespace" in helped.stdout


def test_importing_the_operator_loads_no_torch() -> None:
    code = (
        "import sys, pagefleet_operator.main; sys.exit(any(m.split('.')[0] in ('torch', 'numpy') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
