"""Sends an answer that is no stream: at once when it is small, else as its reader takes it."""

import asyncio
import socket

from aiohttp import web

from pagefleet_server.api.service import SERVICE

OUTCOME = web.RequestKey("outcome", str)
"""How an answer ended, when it did not end well, for the access log."""
KERNEL_BUFFER_BYTES = 64 * 1024
"""Of one connection whose reader may be slow; aiohttp holds as much again. By itself the kernel takes megabytes."""
PIECE_BYTES = 64 * 1024
"""So much the kernel takes at once, whoever reads."""


async def send_json(request: web.Request, data: bytes) -> web.StreamResponse:
    """`data` is JSON. A reader that takes none of it for --write-timeout seconds is dropped."""
    if len(data) <= PIECE_BYTES:
        return web.Response(body=data, content_type="application/json")
    seconds = request.app[SERVICE].settings.http.write_timeout_seconds
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(data))})
    bound_kernel_buffer(request)
    try:
        async with asyncio.timeout(seconds):
            await response.prepare(request)
        for start in range(0, len(data), PIECE_BYTES):
            async with asyncio.timeout(seconds):
                await response.write(data[start : start + PIECE_BYTES])
        async with asyncio.timeout(seconds):
            await response.write_eof()
    except (TimeoutError, ConnectionError) as error:
        give_up(request, error)
    return response


def give_up(request: web.Request, error: TimeoutError | ConnectionError) -> None:
    """Note why and cut the connection: the client must not take a torn answer for a whole one."""
    request[OUTCOME] = "client_too_slow" if isinstance(error, TimeoutError) else "client_gone"
    if request.transport is not None:
        request.transport.abort()


def bound_kernel_buffer(request: web.Request) -> None:
    """For this connection."""
    connection = None if request.transport is None else request.transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BUFFER_BYTES)
