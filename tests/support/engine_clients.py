"""Starting and ending engine clients in tests."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pagefleet_server.client.engine_client import EngineClient
from pagefleet_server.settings import EngineSettings
from support.memory_engine import ENGINE_COMMAND

DEADLINE_SECONDS = 90.0


@asynccontextmanager
async def engine(settings: EngineSettings, *, ready: bool = True) -> AsyncIterator[EngineClient]:
    """A started engine without a model; always ended."""
    client = EngineClient(settings, command=ENGINE_COMMAND)
    try:
        await client.start()
        if ready:
            await asyncio.wait_for(client.wait_ready(), DEADLINE_SECONDS)
        yield client
    finally:
        await client.stop(timeout_seconds=DEADLINE_SECONDS if client.dead is None else 1.0)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Let the loop run until the condition holds."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_SECONDS
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"waited too long until {what}"
        await asyncio.sleep(0.005)
