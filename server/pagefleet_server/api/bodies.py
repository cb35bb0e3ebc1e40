"""Reads a request's body into its model."""

import asyncio
from typing import TypeVar

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError
from pydantic import BaseModel

from pagefleet_server.api.errors import SlowBodyError, TornBodyError, UnsupportedMediaTypeError
from pagefleet_server.api.large_body import parse_body
from pagefleet_server.api.protocol.fields import check_extra
from pagefleet_server.api.service import Service
from pagefleet_server.log import LOGGER, name_fault

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: web.Request, service: Service, kind: type[Body]) -> Body:
    """The validated body. Raises BadRequestError, UnsupportedMediaTypeError, SlowBodyError, TornBodyError.

    aiohttp raises what becomes 413; a body that is announced as too large is not waited for. A field that nobody knows
    is named once in the log."""
    if request.headers.get("Content-Type") is not None and request.content_type != "application/json":
        raise UnsupportedMediaTypeError(
            f"the body is announced as {request.content_type[:100]!r}; send Content-Type: application/json"
        )
    packed = request.headers.get("Content-Encoding", "identity")
    if packed.lower() != "identity":
        raise UnsupportedMediaTypeError(f"the body is packed (Content-Encoding: {packed[:100]!r}); send it as it is")
    limit = service.settings.http.max_body_bytes
    if request.content_length is not None and request.content_length > limit:
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=request.content_length)
    seconds = service.settings.http.read_timeout_seconds
    try:
        async with asyncio.timeout(seconds):
            raw = await _read_bytes(request, service)
    except TimeoutError as error:
        raise SlowBodyError(f"the body did not arrive within {seconds:g} s") from error
    except RequestPayloadError as error:
        raise TornBodyError(f"the body cannot be read: {name_fault(str(error))}") from error
    body = await parse_body(raw, kind)
    for name in service.unknown_fields.fresh(check_extra(body.model_extra or {})):
        LOGGER.warning("unknown field %r in a body of %s is ignored; told once", name, request.path)
    return body


async def _read_bytes(request: web.Request, service: Service) -> bytes:
    """As aiohttp's read(), with a bound over all requests together."""
    limit = service.settings.http.max_body_bytes
    raw = bytearray()
    with service.reading_body() as hold:
        while chunk := await request.content.readany():
            hold(len(chunk))
            raw += chunk
            if len(raw) > limit:
                raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=len(raw))
    return bytes(raw)
