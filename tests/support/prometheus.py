"""A real Prometheus that scrapes a fleet of the local cluster, with the labels that the manifests' PodMonitors give."""

import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from support.fleet import Fleet

CONFIG = """
global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}
rule_files: [rules.yaml]
scrape_configs:
  - job_name: pagefleet
    file_sd_configs: [{files: [targets.json], refresh_interval: 1s}]
"""
READY_SECONDS = 30.0
EXECUTABLE = shutil.which("prometheus")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Prometheus:
    """`with Prometheus(folder, fleet, operator=...)`: targets follow the fleet's pods."""

    def __init__(self, folder: Path, fleet: Fleet, *, operator: str, name: str, rules: str) -> None:
        self._folder, self._fleet, self._operator, self._name = folder, fleet, operator, name
        (folder / "prometheus.yaml").write_text(CONFIG)
        (folder / "rules.yaml").write_text(rules)
        self._port = free_port()
        self._stop = threading.Event()
        self._follower = threading.Thread(target=self._follow, name="targets")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Prometheus":
        assert EXECUTABLE is not None
        self._write_targets()
        options = [f"--web.listen-address=127.0.0.1:{self._port}", "--config.file=prometheus.yaml"]
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [EXECUTABLE, *options, "--storage.tsdb.path=data", "--log.level=warn"],
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )
        self._follower.start()
        deadline = time.monotonic() + READY_SECONDS
        while not self._is_ready():
            assert time.monotonic() < deadline and self._process.poll() is None, "Prometheus is not ready"
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._follower.join(30)
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)

    def range(self, query: str, *, start: float, end: float, step: float = 1.0) -> list[dict[str, Any]]:
        """Series of a range query: {"metric": labels, "values": [[time, text], ...]}."""
        found = self._ask("query_range", query=query, start=start, end=end, step=step)
        series: list[dict[str, Any]] = found["data"]["result"]
        return series

    def rules(self) -> list[dict[str, Any]]:
        """Alerts as Prometheus evaluates them."""
        return [rule for group in self._ask("rules")["data"]["groups"] for rule in group["rules"]]

    def _ask(self, path: str, **parameters: Any) -> dict[str, Any]:
        address = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        assert found["status"] == "success", found
        return found

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5):
            return True
        return False

    def _follow(self) -> None:
        while not self._stop.wait(0.5):
            self._write_targets()

    def _write_targets(self) -> None:
        targets = [{"targets": [self._operator], "labels": {"namespace": "default", "pod": "operator"}}]
        for pod in self._fleet.pods(self._name):
            if address := pod["status"].get("podIP"):
                labels = {"namespace": "default", "pod": pod["metadata"]["name"], "llmdeployment": self._name}
                targets.append({"targets": [f"{address}:8000"], "labels": labels})
        draft = self._folder / "targets.new"
        draft.write_text(json.dumps(targets))
        draft.replace(self._folder / "targets.json")
