"""Sends a generation to its client: as one body, or as events while it goes on."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import msgspec
from aiohttp import web

from pagefleet_server.api import sse
from pagefleet_server.api.errors import ApiError
from pagefleet_server.api.generation import Generation, Usage
from pagefleet_server.api.protocol.sampling import SamplingBody
from pagefleet_server.api.reply import Document, Reply
from pagefleet_server.api.service import Service
from pagefleet_server.api.whole_answer import OUTCOME, bound_kernel_buffer, give_up, send_json

USAGE = web.RequestKey("usage", Usage)
"""Token counts for the access log."""


def make_head(prefix: str, service: Service) -> Document:
    """What every document of one answer begins with."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(service.wall_clock()), "model": service.model_name}


async def answer(
    request: web.Request, service: Service, generation: Generation, reply: Reply, body: SamplingBody
) -> web.StreamResponse:
    """As a whole or as a stream, as the body asks."""
    if not body.stream:
        return await send_whole(request, generation, reply)
    http = service.settings.http
    stream = EventStream(request, write_timeout_seconds=http.write_timeout_seconds)
    async with stream.kept_alive(http.stream_keep_alive_seconds):
        return await send_stream(request, generation, reply, body, stream)


async def send_whole(request: web.Request, generation: Generation, reply: Reply) -> web.StreamResponse:
    """Wait for every choice, then answer. Raises UnavailableError."""
    async with aclosing(generation.deltas()) as deltas:
        async for choice, delta in deltas:
            await reply.note(choice, delta)
    request[USAGE] = generation.usage
    document = await reply.whole(generation.choices, generation.usage)
    return await send_json(request, msgspec.json.encode(document))


async def send_stream(
    request: web.Request, generation: Generation, reply: Reply, body: SamplingBody, stream: "EventStream"
) -> web.StreamResponse:
    """Answer event by event. An error before anything was sent is raised; a later one is the last event."""
    opened: set[int] = set()
    wants_usage, wants_continuous_usage = body.wants_usage, body.wants_continuous_usage

    def encode(event: Document) -> bytes:
        if wants_continuous_usage:
            event["usage"] = generation.usage.to_dict()
        elif wants_usage:
            event["usage"] = None
        return sse.encode_event(msgspec.json.encode(event))

    async def follow() -> bytes:
        """Send all events but the last, which is returned."""
        try:
            async with aclosing(generation.deltas()) as deltas:
                async for choice, delta in deltas:
                    data = b""
                    if choice.plan.index not in opened:
                        opened.add(choice.plan.index)
                        opening = await reply.opening(choice)
                        data = b"" if opening is None else encode(opening)
                    piece = reply.piece(choice, delta)
                    if piece is not None:
                        data += encode(piece)
                    if data:
                        await stream.send(data)
        except ApiError as error:
            if not stream.started:
                raise
            request[OUTCOME] = str(error.code)
            return sse.encode_event(error.body.to_json())
        if wants_usage:
            await stream.send(sse.encode_event(msgspec.json.encode(reply.final_usage(generation.usage))))
        return sse.DONE

    try:
        await stream.end(await follow())
    except (TimeoutError, ConnectionError) as error:
        give_up(request, error)
    finally:
        request[USAGE] = generation.usage
    return stream.response


SMALL_BYTES = 16 * 1024
"""Far below what makes the transport ask its writer to wait."""


class EventStream:
    """An SSE response whose reader must keep up: aiohttp's buffer is the only one, and waiting for it has a limit."""

    def __init__(self, request: web.Request, *, write_timeout_seconds: float) -> None:
        self._request = request
        self._timeout = write_timeout_seconds
        self._lock = asyncio.Lock()
        self._num_writes = 0
        self._ended = False
        self.response = web.StreamResponse(headers=sse.HEADERS)

    @property
    def started(self) -> bool:
        """Whether the status line is out."""
        return self.response.prepared

    async def send(self, events: bytes) -> None:
        """Raises TimeoutError when the client takes nothing, ConnectionError when it is gone."""
        if self.started and not self._lock.locked() and self._has_room_for(events):
            self._num_writes += 1
            await self.response.write(events)  # cannot wait, so it needs neither lock nor deadline, which cost as much
        else:
            await self._write(events)

    def _has_room_for(self, events: bytes) -> bool:
        """Whether the client has taken all that was sent, and this is little: then writing only hands it over."""
        transport = self._request.transport
        return transport is not None and len(events) <= SMALL_BYTES and transport.get_write_buffer_size() == 0

    async def end(self, last: bytes) -> None:
        """The last event, and the end of the body."""
        await self._write(last)
        async with asyncio.timeout(self._timeout), self._lock:
            self._ended = True
            await self.response.write_eof()

    @asynccontextmanager
    async def kept_alive(self, seconds: float) -> AsyncIterator[None]:
        """Send a comment whenever nothing was sent for so long."""

        async def comment() -> None:
            while True:
                seen = self._num_writes
                await asyncio.sleep(seconds)
                if seen == self._num_writes and not self._ended:
                    with contextlib.suppress(TimeoutError, ConnectionError):  # the sender of events finds out itself
                        await self._write(sse.KEEP_ALIVE)

        task = asyncio.create_task(comment(), name="keep-alive")
        try:
            yield
        finally:
            task.cancel()

    async def _write(self, data: bytes) -> None:
        self._num_writes += 1
        async with asyncio.timeout(self._timeout), self._lock:
            if not self.response.prepared:
                bound_kernel_buffer(self._request)
                await self.response.prepare(self._request)
            await self.response.write(data)
