"""The content of the images: each stage's commands run in a clean folder, then its entry point as the image has it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from support.dockerfile import Builder, stages
from support.tiny_models import write_tiny_llama

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "images" / "Dockerfile"
FINAL = ("operator", "server", "server-cpu")
MAX_OPERATOR_BYTES = 200 * 2**20


def test_the_linter_finds_nothing() -> None:
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([str(linter), str(DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", FINAL)
def test_an_image_runs_as_a_number_that_is_not_root_and_receives_signals_itself(name: str) -> None:
    found = stages(DOCKERFILE)[name]
    words = {step.word: step.rest for step in found.steps}
    assert words["USER"] == "65532:65532"
    assert words["ENTRYPOINT"].startswith("["), "a shell as process 1 would keep SIGTERM to itself"


def test_every_package_is_exact_and_has_hashes() -> None:
    for path in (ROOT / "images" / "locks").glob("*.txt"):
        entries = re.split(r"\n(?=\S)", path.read_text().strip())
        for entry in entries:
            assert re.match(r"[a-z0-9._-]+==[\w.+!-]+ (; |\\)", entry), (path.name, entry[:80])
            assert "--hash=sha256:" in entry, (path.name, entry[:80])


def test_the_locks_are_of_the_projects_constraints() -> None:
    pins = dict(
        line.lower().replace("_", "-").split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    for path in (ROOT / "images" / "locks").glob("*.txt"):
        for name, version in re.findall(r"^([a-z0-9._-]+)==([^\s;]+)", path.read_text(), re.MULTILINE):
            if name in pins and name != "triton":
                assert pins[name] == version, f"{path.name}: {name}: run tools/lock_images.sh"


def test_the_wheel_stage_copies_every_package() -> None:
    packages = re.findall(r'^    "(\w+)/pagefleet_\w+",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    copied = {step.rest.split()[0] for step in stages(DOCKERFILE)["wheel"].steps if step.word == "COPY"}
    assert packages
    assert set(packages) <= copied


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(ROOT, DOCKERFILE, tmp_path_factory.mktemp("image"))


@pytest.mark.long
def test_the_operators_image_is_slim_and_starts(builder: Builder) -> None:
    builder.build("operator")
    packages = next((builder.root / "opt" / "pagefleet" / "lib").iterdir()) / "site-packages"
    names = {path.name.split("-")[0].lower() for path in packages.glob("*.dist-info")}
    assert names & {"torch", "transformers", "numpy", "triton"} == set()
    size = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file())
    assert size < MAX_OPERATOR_BYTES
    command = [*builder.entrypoint("operator"), "--help"]
    done = subprocess.run(command, env=builder.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(builder.root / "opt" / "pagefleet")


@pytest.mark.long
def test_the_cpu_servers_image_serves_without_a_compiler_and_ends_on_sigterm(builder: Builder, tmp_path: Path) -> None:
    builder.build("server-cpu")
    model = write_tiny_llama(tmp_path / "tiny")
    cache = tmp_path / "cache"
    cache.mkdir()
    environment = builder.environment | {"HOME": str(cache), "PAGEFLEET_CACHE_DIR": str(cache), "CXX": "/nonexistent"}
    # No compiler on the path, as in the image.
    environment["PATH"] = f"{builder.root}/opt/pagefleet/bin"
    (executable,) = builder.entrypoint("server-cpu")
    program = str(builder.root / "opt" / "pagefleet" / "bin" / executable)
    command = [program, "--model", str(model), "--port", "0", "--kv-cache-memory", "16MiB", "--threads", "1"]
    if os.geteuid() == 0:
        # As process 1, as in a container: no default action for signals, orphans are its own.
        command = ["/usr/bin/unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command]
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=output, stderr=output)
    try:
        url = wait_for(log, process)
        body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
        assert 'attention="cpu' in metrics, "the prebuilt library was not taken"
        inner = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(inner[0]) if os.geteuid() == 0 else process.pid, signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def wait_for(log: Path, process: "subprocess.Popen[bytes]", seconds: float = 120.0) -> str:
    """The base URL of a server that is ready."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"listening on (http://\S+)", log.read_text()):
            try:
                with urllib.request.urlopen(f"{found[1]}/readyz", timeout=5):
                    return found[1]
            except OSError:
                pass
        time.sleep(0.2)
    raise AssertionError(f"not ready: {log.read_text()[-3000:]}")
