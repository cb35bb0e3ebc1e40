"""The end of a server of a test, whoever is just connecting to it."""

import asyncio
from typing import Any

from aiohttp import web


async def end_serving(runner: web.AppRunner) -> None:
    """As runner.cleanup(), after the connections that are being accepted.

    One that asyncio has accepted when its server is closed leaves a transport that nobody can close, and a warning
    about it at some later time.
    """
    loop = asyncio.get_running_loop()
    for site in runner.sites:
        server: Any = site._server
        for listening in server.sockets if server is not None else ():
            loop.remove_reader(listening.fileno())
    for _ in range(3):  # Accepting takes two turns of the loop.
        await asyncio.sleep(0)
    await runner.cleanup()
