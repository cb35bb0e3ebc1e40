"""The stage of gpu_e2e.py that runs the whole program: two processes and HTTP."""

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import gpu_models
from benchmarks.gpu_e2e_setting import Facts, Setting, StageFailedError


def server(setting: Setting) -> Facts:
    """The whole program: two processes, HTTP, streams in parallel."""
    port, count, new = _free_port(), 4 if setting.tiny else 32, 8 if setting.tiny else 128
    with tempfile.TemporaryDirectory() as folder:
        path = gpu_models.write_config(Path(folder) / "model", setting.large)
        command = [sys.executable, "-m", "pagefleet_server.main", "--model", str(path), "--load-format", "dummy"]
        command += ["--device", setting.device, "--dtype", setting.dtype, "--port", str(port), "--drain-delay", "0"]
        log_path = Path(folder) / "log"
        with log_path.open("wb") as log:
            began = time.perf_counter()
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while not _answers(f"http://127.0.0.1:{port}/readyz"):
                if process.poll() is not None or time.perf_counter() - began > 150:
                    raise StageFailedError("the server did not become ready", {"log": _tail(log_path)})
                time.sleep(0.1)
            facts: Facts = {"ready_seconds": round(time.perf_counter() - began, 2)}

            def ask(index: int) -> int:
                body = {"model": "model", "prompt": f"Request {index}", "max_tokens": new, "ignore_eos": True}
                answer = _post(f"http://127.0.0.1:{port}/v1/completions", {**body, "temperature": 0.0})
                return int(answer["usage"]["completion_tokens"])

            began = time.perf_counter()
            with ThreadPoolExecutor(count) as pool:
                tokens = sum(pool.map(ask, range(count)))
            seconds = time.perf_counter() - began
            facts |= {"requests": count, "output_tokens": tokens, "tokens_per_second": round(tokens / seconds, 1)}
            if tokens != count * new:
                raise StageFailedError("requests ended early", {**facts, "log": _tail(log_path)})
            return facts
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _post(url: str, body: Mapping[str, object]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        result: dict[str, Any] = json.loads(answer.read())
    return result


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-4000:]
