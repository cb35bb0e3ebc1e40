"""A local cluster and an operator as real processes, and kubectl against them."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.1


class Fleet:
    """`with Fleet(folder) as fleet:` — everything it starts ends with the block, and the block fails if it does not."""

    def __init__(self, folder: Path, *, operator_flags: Sequence[str] = ()) -> None:
        self.folder = folder
        self._operator_flags = operator_flags
        self.env = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "KUBECONFIG": str(folder / "kubeconfig"),
        }
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Fleet":
        try:
            self._bring_up()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _bring_up(self) -> None:
        self._start("pagefleet-local", "up", "--dir", str(self.folder))
        self.until("the API answers", lambda: self.kubectl("get", "--raw", "/readyz", check=False) == "ok", seconds=90)
        self.kubectl("apply", "-f", str(ROOT / "crds" / "llmdeployment.yaml"))
        self.kubectl("wait", "--for=condition=Established", "crd/llmdeployments.pagefleet.dev", "--timeout=60s")
        self._start("pagefleet-operator", "--namespace", "default", *self._operator_flags)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        children = [
            child for process in self._processes for child in psutil.Process(process.pid).children(recursive=True)
        ]
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        _, alive = psutil.wait_procs(children, timeout=5)
        for child in alive:
            child.kill()
        if kind is not None:
            for log in sorted(self.folder.glob("**/*.log")):
                print(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-30:]))
        elif alive:
            raise AssertionError(f"still running after the cluster's end: {alive}")

    def _start(self, command: str, *arguments: str) -> None:
        with (self.folder / f"{command}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [str(BIN / command), *arguments],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.env,
                    start_new_session=True,
                )
            )

    def kubectl(self, *arguments: str, check: bool = True, stdin: str | None = None) -> str:
        """Standard output, stripped; with check=False the error output when it fails."""
        done = subprocess.run(
            [str(BIN / "kubectl"), *arguments], env=self.env, capture_output=True, text=True, timeout=120, input=stdin
        )
        if done.returncode != 0:
            if check:
                raise AssertionError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
            return done.stderr.strip()
        return done.stdout.strip()

    def apply(self, manifest: dict[str, Any]) -> str:
        """kubectl apply; what it printed."""
        return self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """One object."""
        found: dict[str, Any] = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        return found

    def pods(self, name: str) -> list[dict[str, Any]]:
        """The pods of one LLMDeployment that are not ending."""
        listing = json.loads(self.kubectl("get", "pods", "-l", f"pagefleet.dev/llmdeployment={name}", "-o", "json"))
        return [pod for pod in listing["items"] if "deletionTimestamp" not in pod["metadata"]]

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        """One condition of an LLMDeployment; empty when it is not there."""
        conditions = self.get("llmd", name).get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {})

    def service_url(self, name: str) -> str:
        """Where clients reach an LLMDeployment."""
        spec = self.get("service", name)["spec"]
        return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"

    def until(self, what: str, holds: Callable[[], Any], *, seconds: float) -> None:
        """Poll until `holds` is true; AssertionError naming `what` after `seconds`, or when a process of ours ended."""
        deadline = time.monotonic() + seconds
        while not holds():
            ended = [process.args for process in self._processes if process.poll() is not None]
            assert not ended, f"while waiting until {what}: {ended} ended"
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
            time.sleep(POLL_SECONDS)

    def wait_available(self, name: str, *, seconds: float = 180) -> None:
        """Until the condition Available is True for the newest generation."""
        self.until(
            f"{name} is Available",
            lambda: self.condition(name, "Available").get("status") == "True",
            seconds=seconds,
        )


def deployment(name: str, model: Path, *, engine: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """An LLMDeployment manifest with short drains, a small KV cache and the kernels that this machine has built."""
    kernels = Path.home() / ".cache" / "pagefleet"
    return {
        "apiVersion": "pagefleet.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": f"file://{model}"},
            "engine": {
                "args": ["--threads=1", "--num-kv-blocks=2000"],
                "env": [{"name": "PAGEFLEET_CACHE_DIR", "value": str(kernels)}],
                **(engine or {}),
            },
            "drain": {"delaySeconds": 1, "timeoutSeconds": 20},
            **spec,
        },
    }


def http(url: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and text; 0 and the reason when there was no answer."""
    request = urllib.request.Request(url, data=json.dumps(body).encode() if body is not None else None)
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)
