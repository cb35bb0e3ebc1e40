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
SAMPLE_MODEL = "/models/SmolLM2-135M-Instruct.Q4_1.gguf"
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


def test_the_quickstart_on_a_laptop(tmp_path: Path) -> None:
    script = block("docs/quickstart.md", "pagefleet-local up")
    script = script.replace(".demo", str(tmp_path)).replace("$PWD/" + str(tmp_path), str(tmp_path))
    script = script.replace(".venv/bin/pagefleet-local", str(Path(sys.executable).with_name("pagefleet-local")))
    sample = tmp_path / "quickstart.yaml"
    text = (ROOT / "manifests" / "samples" / "quickstart.yaml").read_text()
    sample.write_text(text.replace(SAMPLE_MODEL, str(smollm2_gguf())))
    script = script.replace("manifests/samples/quickstart.yaml", str(sample))
    # A person waits until the cluster answers, and ends the last command by Ctrl-C.
    wait = "for i in $(seq 100); do kubectl get --raw /readyz >/dev/null 2>&1 && break; sleep 0.2; done\n"
    script = script.replace("kubectl apply -f crds/", wait + "kubectl apply -f crds/")
    script = script.replace("kubectl get llmd -w", "kubectl wait llmd/smollm2 --for=condition=Available --timeout=240s")
    ask = 'kubectl pagefleet chat smollm2 --temperature 0 "What is the capital of Japan?"\n'
    output = run(script + ask, tmp_path, seconds=400)
    assert "Tokyo" in output


def test_the_server_alone_as_the_readme_starts_it(tmp_path: Path) -> None:
    script = block("README.md", "pagefleet-server --model")
    start, _, ask = script.partition("\n")
    start = start.replace(SAMPLE_MODEL, str(smollm2_gguf())).replace("2GiB", "64MiB")
    wait = "for i in $(seq 300); do curl -sf localhost:8000/readyz >/dev/null && break; sleep 0.2; done\n"
    output = run(f"{start} &\n{wait}{ask}", tmp_path, seconds=200)
    assert "Tokyo" in output
