"""Start-up: from the spawn of a server to its first token, and the memory that it took, beside other programs.

Each program is started anew, in turn, `--rounds` times; the median round counts (files in the page cache, kernels
built). "memory" is the high-water mark of resident memory, summed over the program's processes (pages that they share
count in each). Ours is held to: the first token within 3 s, and memory under 1.3 x weights + KV + 600 MB.

    python -m benchmarks.startup [--model PATH] [--rounds N] [--llama-server PATH] [--ahead]

--ahead, for a machine that others use: each start runs before everything else on it, and then waits as long.
"""

import argparse
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.serving.paths import default_paths, quantised_gguf
from benchmarks.undisturbed import ahead_of_others, conditions

KV_BYTES = 512 * 1024**2
GIVE_UP_SECONDS = 300.0
TRANSFORMERS = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, GgufConfig
path = Path(sys.argv[1])
torch.set_num_threads(int(sys.argv[2]))
kind = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)} if path.suffix == ".gguf" else {}
folder = path.parent if kind else path
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **kind)
model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=1, do_sample=False, pad_token_id=0)
print("first token", flush=True)
sys.stdin.read()
"""
"""A process that loads the model, makes one token and waits to be told to end."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start of one program."""

    ready_s: float
    """From the spawn to the first answer of its health check."""
    first_token_s: float
    cpu_s: float
    """CPU time of all its processes until then: says something on a busy machine, too."""
    memory_mib: float
    weight_bytes: int = 0
    """That our server says it holds."""


def main() -> None:
    """Measure and print; the last line is the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="directory or .gguf file; default: SmolLM2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama-server", default=_llama_server(), help="default: on the PATH, or among the peers")
    parser.add_argument("--ahead", action="store_true", help="run each start before everything else on the machine")
    options = parser.parse_args()
    model: Path = options.model or quantised_gguf()
    starts: dict[str, list[Start]] = {}
    print(f"{model.name} · {platform.machine()} · commit {_commit()} · {conditions(bursts=options.ahead)}")
    start_server = partial(_start_server, ahead=options.ahead)
    for _ in range(options.rounds):
        for name in ("fused", "transformers"):
            ours = [sys.executable, "-m", "pagefleet_server.main", "--model", str(model), "--executor", name]
            ours += ["--kv-cache-memory", str(KV_BYTES), "--threads", str(options.threads), "--port"]
            starts.setdefault(f"ours, {name}", []).append(start_server(ours, "/readyz"))
        starts.setdefault("transformers, in process", []).append(
            _start_transformers(model, options.threads, ahead=options.ahead)
        )
        if options.llama_server and model.suffix == ".gguf":
            peer = [options.llama_server, "-m", str(model), "-t", str(options.threads), "-c", "8192", "--port"]
            starts.setdefault("llama.cpp", []).append(start_server(peer, "/health"))
    print(
        f"{'median of ' + str(options.rounds):28s}{'ready s':>10s}{'first token s':>15s}{'(least, most)':>15s}"
        f"{'CPU s':>8s}{'memory MiB':>12s}"
    )
    middle = {
        name: sorted(found, key=lambda start: start.first_token_s)[len(found) // 2] for name, found in starts.items()
    }
    for name, start in middle.items():
        firsts = [each.first_token_s for each in starts[name]]
        spread = f"({min(firsts):.2f}, {max(firsts):.2f})"
        print(
            f"{name:28s}{start.ready_s:10.2f}{start.first_token_s:15.2f}{spread:>15s}"
            f"{start.cpu_s:8.2f}{start.memory_mib:12.0f}"
        )
    if "llama.cpp" not in middle:
        print("llama.cpp: no llama-server found (--llama-server)")
    _print_bar(middle["ours, fused"])
    print(json.dumps({"commit": _commit(), "load": os.getloadavg()[0], **{k: asdict(v) for k, v in middle.items()}}))


def _print_bar(ours: Start) -> None:
    """What ours is held to, and whether it holds."""
    bar = (1.3 * ours.weight_bytes + KV_BYTES + 600e6) / 2**20
    for what, value, limit in (("first token s", ours.first_token_s, 3.0), ("memory MiB", ours.memory_mib, bar)):
        print(f"ours, fused: {what} {value:.2f}, at most {limit:.2f}: {'holds' if value <= limit else 'MISSED'}")


def _start_server(command: list[str], health: str, *, ahead: bool) -> Start:
    """A server that answers `health` with 200 when it is ready, and POST /v1/completions."""
    port = _free_port()
    base = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log, ahead_of_others(wanted=ahead):
        began = time.monotonic()
        process = subprocess.Popen([*command, str(port)], stdout=subprocess.DEVNULL, stderr=log)
        try:
            _wait(process, base + health)
            ready = time.monotonic() - began
            body = json.dumps({"model": _model_name(base), "prompt": "Once", "max_tokens": 1, "temperature": 0})
            _get(f"{base}/v1/completions", body)
            first = time.monotonic() - began
            cpu, memory = _cpu_seconds(process.pid), _memory_mib(process.pid)
            log.seek(0)
            weights = re.search(r"(\d+) bytes of weights", log.read())
            return Start(ready, first, cpu, memory, int(weights[1]) if weights else 0)
        finally:
            process.kill()
            process.wait()


def _start_transformers(model: Path, threads: int, *, ahead: bool) -> Start:
    command = [sys.executable, "-c", TRANSFORMERS, str(model), str(threads)]
    quiet = {**os.environ, "HF_HUB_OFFLINE": "1"}
    pipe = subprocess.PIPE
    with ahead_of_others(wanted=ahead):
        began = time.monotonic()
        with subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=quiet
        ) as process:
            assert process.stdout is not None and process.stdin is not None
            if process.stdout.readline().strip() != "first token":
                raise SystemExit("transformers did not load the model")
            seconds = time.monotonic() - began
            cpu, memory = _cpu_seconds(process.pid), _memory_mib(process.pid)
            process.stdin.close()
            return Start(seconds, seconds, cpu, memory)


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended with {process.returncode}")
        try:
            _get(url)
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.02)
    raise SystemExit(f"{url} did not answer within {GIVE_UP_SECONDS:.0f} s")


def _get(url: str, body: str | None = None) -> bytes:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=None if body is None else body.encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        data: bytes = reply.read()
        return data


def _model_name(base: str) -> str:
    return str(json.loads(_get(f"{base}/v1/models"))["data"][0]["id"])


def _memory_mib(pid: int) -> float:
    """High-water marks of a process and its descendants."""
    total = 0
    for each in _family(pid):
        text = Path(f"/proc/{each}/status").read_text()
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM"))
    return total / 1024


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process and its descendants."""
    fields = [Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split() for each in _family(pid)]
    return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _family(int(child))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _commit() -> str:
    shown = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return shown.stdout.strip()


def _llama_server() -> str | None:
    built = default_paths().llama_build / "bin" / "llama-server"
    return str(built) if built.exists() else shutil.which("llama-server")


if __name__ == "__main__":
    main()
