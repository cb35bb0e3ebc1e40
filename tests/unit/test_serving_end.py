"""The servers of tests end without a trace."""

import asyncio
import gc
import socket

import pytest
from aiohttp import web

from support.serving_end import end_serving


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_at_the_last_moment_leaves_nothing(turns: int) -> None:
    """What it left would be an error here: see filterwarnings."""
    runner = web.AppRunner(web.Application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    with socket.create_connection(runner.addresses[0][:2]):
        for _ in range(turns):
            await asyncio.sleep(0)
        await end_serving(runner)
    del runner
    gc.collect()
