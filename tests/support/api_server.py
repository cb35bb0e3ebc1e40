"""Starts real server processes and talks to them. The engine is the real one, or a real process without a model.

`python -c ... main()` with FAULT in front of the flags serves the engine of support.memory_engine; besides its faults
"never-ready" is an engine that never says that it is.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pagefleet_server.cli import parse_settings
from pagefleet_server.client.engine_client import EngineClient
from pagefleet_server.log import configure_logging
from pagefleet_server.main import run_to_end, serve
from pagefleet_server.settings import EngineSettings
from support.kv_memory_runner import VOCAB_SIZE
from support.memory_engine import ENGINE_COMMAND

DEADLINE_SECONDS = 150.0
TESTS = str(Path(__file__).resolve().parents[1])
NEVER_READY_CODE = "import os, sys; fd = int(sys.argv[1].removeprefix('--fd='))\nwhile os.read(fd, 4096): pass"
NEVER_READY = (sys.executable, "-c", NEVER_READY_CODE)
"""Says nothing, and ends with its server."""
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools in this house') }}"
    "{% endif %}{{ message.content }} {% endfor %}"
)


def write_letter_model(path: Path) -> Path:
    """A directory with a tokenizer of VOCAB_SIZE tokens (`</s>`, then single letters) and a chat template."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUĠ."
    vocabulary = {"</s>": 0} | {letter: index for index, letter in enumerate(letters, 1)}
    assert len(vocabulary) == VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return path


def main() -> None:
    fault, *argv = sys.argv[1:]
    configure_logging()

    def make_client(settings: EngineSettings) -> EngineClient:
        model = dataclasses.replace(settings.model, model=fault)
        command = NEVER_READY if fault == "never-ready" else ENGINE_COMMAND
        return EngineClient(dataclasses.replace(settings, model=model), command=command)

    run_to_end(serve(parse_settings(argv, os.environ), make_client=make_client))


class RunningServer:
    """A server process and its log."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process = process
        self._log = log
        self.base_url = ""

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_listening(self) -> None:
        found = poll(lambda: re.search(r"listening on (http://\S+)", self.log), self, "it listens")
        self.base_url = found[1]

    def wait_exit(self) -> int:
        return self.process.wait(DEADLINE_SECONDS)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @property
    def engine_pid(self) -> int:
        (engine,) = psutil.Process(self.process.pid).children()
        return engine.pid


def poll(condition: Callable[[], Any], server: RunningServer, what: str) -> Any:
    """The condition's first true value, while the server lives."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        assert server.process.poll() is None, f"the server ended:\n{server.log}"
        assert time.monotonic() < deadline, f"waited too long until {what}:\n{server.log}"
        time.sleep(0.02)
    return value


@contextmanager
def running(command: Sequence[str], log: Path, env: dict[str, str] | None = None) -> Iterator[RunningServer]:
    """A started process; killed at the end if it has not ended."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **(env or {})})
    try:
        yield RunningServer(process, log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(DEADLINE_SECONDS)


def memory_command(fault: str, model: Path, *flags: str) -> list[str]:
    code = f"import sys; sys.path.insert(0, {TESTS!r}); from support.api_server import main; main()"
    common = ["--model", str(model), "--served-model-name", "letters", "--port", "0", "--block-size", "8"]
    bounds = {"--num-kv-blocks": "64", "--max-num-seqs": "8", "--max-num-batched-tokens": "64", "--drain-delay": "0"}
    for name, value in bounds.items():
        if name not in flags:
            common += [name, value]
    return [sys.executable, "-c", code, fault, *common, *flags]


@asynccontextmanager
async def memory_server(tmp_path: Path, fault: str, *flags: str) -> AsyncIterator["Talk"]:
    """A server over an engine without a model, ready unless it cannot be."""
    model = write_letter_model(tmp_path / "model")
    with running(memory_command(fault, model, *flags), tmp_path / "server.log") as server:
        server.wait_listening()
        async with aiohttp.ClientSession(server.base_url) as session:
            talk = Talk(server, session)
            if fault != "never-ready":
                await talk.until_ready()
            yield talk


def raw_completion(**body: Any) -> bytes:
    """The bytes of a whole request."""
    data = json.dumps(body)
    head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    return ("\r\n".join([*head, f"Content-Length: {len(data)}"]) + "\r\n\r\n" + data).encode()


async def cut(writer: asyncio.StreamWriter) -> None:
    """Reset a connection."""
    writer.transport.abort()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


class Talk:
    """A client of one running server."""

    def __init__(self, server: RunningServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    async def until_ready(self) -> None:
        await self.until(lambda: self._is_ready(), "it is ready")

    async def _is_ready(self) -> bool:
        return (await self.get("/readyz"))[0] == 200

    async def until(self, condition: Callable[[], Any], what: str) -> Any:
        """The first true value of an async condition, while the server lives."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (value := await condition()):
            assert self.server.process.poll() is None, f"the server ended:\n{self.server.log}"
            assert time.monotonic() < deadline, f"waited too long until {what}:\n{self.server.log}"
            await asyncio.sleep(0.01)
        return value

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(path) as response:
            return response.status, await response.text()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection whose reader takes little."""
        host, port = self.server.base_url.removeprefix("http://").split(":")
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        return await asyncio.open_connection(sock=connection, limit=1024)

    async def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        async with self.session.post(path, json=body) as response:
            return response.status, json.loads(await response.read())

    async def complete(self, prompt: Any = "ab", **fields: Any) -> dict[str, Any]:
        status, answer = await self.post("/v1/completions", prompt=prompt, **fields)
        assert status == 200, answer
        return answer

    async def stream(self, path: str = "/v1/completions", **body: Any) -> list[Any]:
        """Every event; "[DONE]" as it is."""
        return [event async for event in self.events(path, **body)]

    async def events(self, path: str = "/v1/completions", **body: Any) -> AsyncIterator[Any]:
        async with self.session.post(path, json={"stream": True, **body}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            async for line in response.content:
                if line.startswith(b"data: "):
                    data = line[6:].decode().strip()
                    yield data if data == "[DONE]" else json.loads(data)

    async def metrics(self, *names: str) -> dict[str, float]:
        """Sample name with its own labels (model_name and engine left out) -> value."""
        query = "&".join(f"name[]={name}" for name in names)
        status, text = await self.get(f"/metrics?{query}")
        assert status == 200
        samples = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = re.sub(r'(,?)(engine|model_name)="[^"]*"', "", name).replace("{,", "{").replace("{}", "")
                samples[name] = float(value)
        return samples

    async def gauge(self, name: str) -> float:
        return (await self.metrics())[name]

    async def until_idle(self) -> dict[str, float]:
        """The metrics once nothing runs, waits or holds a block."""

        async def idle() -> dict[str, float] | None:
            metrics = await self.metrics()
            busy = ("vllm:num_requests_running", "vllm:num_requests_waiting", 'pagefleet_kv_blocks{state="used"}')
            return None if any(metrics[name] for name in busy) else metrics

        metrics: dict[str, float] = await self.until(idle, "it is idle")
        return metrics
