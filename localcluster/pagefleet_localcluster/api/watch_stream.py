"""A watch as an HTTP response: one JSON event a line, until its timeout or until the client stops reading."""

import asyncio
import json
import random

from aiohttp import web

from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.errors import ApiError
from pagefleet_localcluster.api.reads import Selection, WatchEvent, watch
from pagefleet_localcluster.api.views import View, render_bookmark, render_event

_MIN_TIMEOUT_SECONDS = 1800
"""Shortest life of a watch whose client names none; the longest is twice that."""
_WRITE_SECONDS = 30.0
"""A client that does not take an event for this long loses its watch."""


async def stream_watch(request: web.Request, cluster: Cluster, selection: Selection, view: View) -> web.StreamResponse:
    """Answers a watch."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Cache-Control": "no-cache, private"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    header = True
    try:
        async for event in watch(cluster, selection, request.query, timeout_seconds=_timeout(request)):
            async with asyncio.timeout(_WRITE_SECONDS):
                await response.write(_line(cluster, selection, event, view, header=header))
            header = False
    except ApiError as error:
        text = json.dumps({"type": "ERROR", "object": error.status()}, separators=(",", ":"))
        await response.write(text.encode() + b"\n")
    except (TimeoutError, ConnectionError):
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


def _line(cluster: Cluster, selection: Selection, event: WatchEvent, view: View, *, header: bool) -> bytes:
    if event.stored is None:
        return render_bookmark(selection.resource, event.version, view, initial_end=event.initial_end)
    return render_event(cluster, selection.resource, event.kind, event.stored, view, header=header)


def _timeout(request: web.Request) -> float:
    text = request.query.get("timeoutSeconds", "")
    if text.isdecimal() and int(text) > 0:
        return float(min(int(text), 86400))
    return _MIN_TIMEOUT_SECONDS * (1 + random.random())  # spreads the clients' reconnections
