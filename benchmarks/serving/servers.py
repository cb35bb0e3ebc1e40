"""Running peers: started or already there, asked for a workload, ended."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import aiohttp

from benchmarks.serving.client import send_workload
from benchmarks.serving.machine import CoreMeter, peak_mib, tree
from benchmarks.serving.outcome import Answer, Run, summarise
from benchmarks.serving.peers import Peer
from benchmarks.serving.workloads import Request, Workload

START_SECONDS = 1500.0
"""The first start of one of them compiles for minutes."""
STOP_SECONDS = 20.0
NOT_FOR_PEERS = ("OMP_NUM_THREADS", "PYTHONPATH")
"""Of the caller's environment: each server decides on its threads, and has its own packages."""


class Server:
    """One running peer."""

    def __init__(self, peer: Peer, pid: int, url: str, process: "subprocess.Popen[bytes] | None" = None) -> None:
        self.peer = peer
        self.pid = pid
        self.url = url
        """Empty for a peer in-process."""
        self.start_seconds = 0.0
        self._process = process

    @classmethod
    async def start(cls, peer: Peer, log: Path) -> "Server":
        """Start it and wait for its first answer. Raises RuntimeError with the end of its log."""
        port = free_port()
        began = time.perf_counter()
        process = spawn(peer, port, log)
        server = cls(peer, process.pid, "" if peer.in_process else f"http://127.0.0.1:{port}", process)
        try:
            await server._until_first_answer(log)
        except BaseException:
            server.stop()
            raise
        server.start_seconds = time.perf_counter() - began
        return server

    async def _until_first_answer(self, log: Path) -> None:
        assert self._process is not None
        if self.peer.in_process:
            await asyncio.to_thread(_read_line, self._process.stdout)
            return
        body = self.peer.body(Request(" Hello", 1, 1)) | {"stream": False}
        body.pop("stream_options", None)
        deadline = time.perf_counter() + START_SECONDS
        async with aiohttp.ClientSession(self.url) as session:
            while True:
                try:
                    async with session.post("/v1/completions", json=body) as response:
                        if response.status == 200:
                            return
                        answer = f"HTTP {response.status}: {(await response.text())[:300]}"
                except aiohttp.ClientError as error:
                    answer = str(error)
                if self._process.poll() is not None or time.perf_counter() > deadline:
                    raise RuntimeError(f"{self.peer.name} does not answer ({answer}); its log ends:\n{_tail(log)}")
                await asyncio.sleep(0.05)

    async def measure(self, workload: Workload, round_index: int) -> Run:
        """Run a workload once."""
        meter = CoreMeter(self.pid)
        if self.peer.in_process:
            answers = await asyncio.to_thread(self._in_process, workload)
        else:
            answers = await send_workload(self.url, workload, self.peer.body)
        return summarise(workload.name, self.peer.name, round_index, answers, meter.read())

    def _in_process(self, workload: Workload) -> list[Answer]:
        assert self._process is not None and self._process.stdin is not None
        requests = [[request.prompt, request.num_output, request.at] for request in workload.requests]
        line = json.dumps({"requests": requests, "concurrency": workload.concurrency})
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        found = _read_line(self._process.stdout)["answers"]
        return [
            Answer(sent, tuple(times), num_prompt, num_output, "" if num_output == request.num_output else "cut short")
            for request, (sent, times, num_prompt, num_output) in zip(workload.requests, found, strict=True)
        ]

    def peak_mib(self) -> float:
        """High-water of its memory so far."""
        return peak_mib(self.pid)

    def stop(self) -> None:
        """End it and all that it started; one that was there before is left alone."""
        if self._process is None:
            return
        members = tree(self.pid)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in members:
                if process.is_running():
                    process.send_signal(number)
            deadline = time.perf_counter() + STOP_SECONDS
            while time.perf_counter() < deadline and any(_lives(process) for process in members):
                self._process.poll()
                time.sleep(0.05)
        self._process.wait(STOP_SECONDS)


def spawn(peer: Peer, port: int, log: Path) -> "subprocess.Popen[bytes]":
    """Its process, in a group of its own, so that Ctrl-C reaches only the benchmark."""
    command = [*peer.command] if peer.in_process else [*peer.command, peer.port_flag, str(port)]
    left_out = ["OMP_NUM_THREADS"] if peer.is_ours else NOT_FOR_PEERS
    env = {key: value for key, value in os.environ.items() if key not in left_out} | peer.env
    pipe = subprocess.PIPE if peer.in_process else None
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=pipe or subprocess.DEVNULL,
            stdout=pipe or output,
            stderr=output,
            env=env | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )


def _lives(process: Any) -> bool:
    try:
        return bool(process.is_running() and process.status() != "zombie")
    except Exception:  # noqa: BLE001  it ended between the two questions
        return False


def _read_line(pipe: "IO[bytes] | None") -> dict[str, Any]:
    """The next line of JSON; other lines are a library's chatter."""
    assert pipe is not None
    for line in pipe:
        if line.startswith(b"{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise RuntimeError("the peer ended; see its log")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def free_port() -> int:
    """A port nobody listens on right now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def running_servers(file: Path, make: Callable[[str], Peer]) -> dict[str, Server]:
    """Servers that `--hold` started, by name."""
    found = json.loads(file.read_text())
    servers = {}
    for name, about in found.items():
        server = Server(make(name), about["pid"], about["url"])
        server.start_seconds = about["start_seconds"]
        servers[name] = server
    return servers


def write_running(file: Path, servers: dict[str, Server]) -> None:
    """For running_servers()."""
    about = {n: {"pid": s.pid, "url": s.url, "start_seconds": s.start_seconds} for n, s in servers.items()}
    file.write_text(json.dumps(about, indent=1))
