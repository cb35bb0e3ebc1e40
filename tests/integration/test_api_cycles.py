"""Requests leave no circle of references, however they end: what a circle holds, such as a refused text of megabytes,
stays until a full collection, which is rare and then takes long."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web

from pagefleet_server.api.exit_code import ExitCode
from pagefleet_server.api.server import Server
from pagefleet_server.cli import parse_settings
from pagefleet_server.client.engine_client import EngineClient
from pagefleet_server.stop_signals import StopSignals
from support.api_server import memory_command, write_letter_model
from support.memory_engine import ENGINE_COMMAND

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a"}]
REQUESTS: list[tuple[str, Any, int]] = [
    (COMPLETION, {"prompt": "ab", "max_tokens": 3}, 200),
    (COMPLETION, {"prompt": "ab", "max_tokens": 3, "stream": True}, 200),
    (COMPLETION, {"prompt": ["ab", "a"], "max_tokens": 3, "logprobs": 2, "echo": True}, 200),
    (COMPLETION, {"prompt": "a", "n": 3, "max_tokens": 5, "stream": True, "logprobs": 2}, 200),
    (COMPLETION, {"prompt": [1] * 100_000}, 400),
    (COMPLETION, {"prompt": [1, 77]}, 400),
    (COMPLETION, {"prompt": "ab " * 100_000}, 400),
    (COMPLETION, {"prompt": "ab", "n": 1000}, 400),
    (COMPLETION, {"prompt": "ab", "max_tokens": 10**6}, 400),
    (COMPLETION, {"prompt": "ab", "guided_regex": "("}, 400),
    (COMPLETION, {"prompt": "ab", "max_tokens": 400, "ignore_eos": True, "timeout": 0.05}, 504),
    (COMPLETION, {"prompt": "a", "n": 4, "max_tokens": 400, "ignore_eos": True, "timeout": 0.05, "stream": True}, 200),
    (COMPLETION, {"prompt": "a", "model": "another"}, 404),
    (COMPLETION, None, 400),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2}, 200),
    (CHAT, {"messages": [{"role": "tool", "content": "a", "tool_call_id": "x"}]}, 400),
    ("/tokenize", {"prompt": "ab" * 100_000}, 200),
    ("/detokenize", {"tokens": [77]}, 400),
    ("/v1/embeddings", {"input": "a"}, 400),
    ("/nothing", {}, 404),
]


class Told(Server):
    """Says where it listens."""

    port: asyncio.Future[int]

    async def _listen(self, runner: web.AppRunner) -> bool:
        listening = await super()._listen(runner)
        self.port.set_result(runner.addresses[0][1])
        return listening


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A server in this process, around the engine without a model."""
    settings = parse_settings(memory_command("fine", write_letter_model(tmp_path / "model"))[4:], {})
    engine = replace(settings.engine, model=replace(settings.engine.model, model="slow-20"))
    client, signals = EngineClient(engine, command=ENGINE_COMMAND), StopSignals()
    server = Told(settings, client=client, signals=signals)
    server.port = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(server.run())
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{await server.port}") as session:
            await client.wait_ready()
            await asyncio.sleep(0)
            yield session
        signals.terminated.set()
        assert await running == ExitCode.OK
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def frames_left() -> list[str]:
    """Of the server's code, in circles that are garbage."""
    gc.collect()
    found = [item for item in gc.garbage if isinstance(item, FrameType)]
    ours = [frame for frame in found if "pagefleet_server" in frame.f_code.co_filename]
    left = {f"{frame.f_code.co_qualname}, line {frame.f_lineno}, with {', '.join(frame.f_locals)}" for frame in ours}
    gc.garbage.clear()
    return sorted(left)


async def test_no_request_leaves_a_circle_however_it_ends(tmp_path: Path) -> None:
    async with served(tmp_path) as session:
        gc.collect()
        enabled, flags = gc.isenabled(), gc.get_debug()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for path, body, status in REQUESTS:
                data = b"{" if body is None else json.dumps(body)
                headers = {"Content-Type": "application/json"}
                async with session.post(path, data=data, headers=headers) as response:
                    assert response.status == status, (body, await response.text())
                    await response.read()
                assert frames_left() == [], f"{path} {str(body)[:200]} ({status})"
            body = {"prompt": "a", "n": 2, "max_tokens": 400, "ignore_eos": True, "stream": True}
            for stream in (True, False):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.3):
                        async with session.post(COMPLETION, json=body | {"stream": stream}) as response:
                            await response.read()
            await asyncio.sleep(0)
            # The HTTP library leaves the handlers' outermost frames, and with them nothing that the client sent.
            left = [told for told in frames_left() if "body" in told or "generation" in told or "text" in told]
            assert left == [], "clients that leave"
        finally:
            gc.set_debug(flags)
            gc.garbage.clear()
            if enabled:
                gc.enable()
    left = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    assert not [command for command in left if "pagefleet_server" in command], "no process is left either"
