"""Reads a request's body into its model."""

import asyncio
from typing import TypeVar

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError
from pydantic import BaseModel, ValidationError

from pagefleet_server.api.errors import BadRequestError, SlowBodyError, UnsupportedMediaTypeError, describe_validation
from pagefleet_server.api.protocol.fields import check_extra
from pagefleet_server.api.service import Service
from pagefleet_server.log import LOGGER

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: web.Request, service: Service, kind: type[Body]) -> Body:
    """The validated body. Raises BadRequestError, UnsupportedMediaTypeError, SlowBodyError.

    aiohttp raises what becomes 413. A field that nobody knows is named once in the log."""
    if request.headers.get("Content-Type") is not None and request.content_type != "application/json":
        raise UnsupportedMediaTypeError(
            f"the body is announced as {request.content_type[:100]!r}; send Content-Type: application/json"
        )
    seconds = service.settings.http.read_timeout_seconds
    try:
        async with asyncio.timeout(seconds):
            raw = await request.read()
    except TimeoutError as error:
        raise SlowBodyError(f"the body did not arrive within {seconds:g} s") from error
    except RequestPayloadError as error:
        reason = " ".join(str(error).removeprefix("400, message:").split())[:200]
        raise BadRequestError(f"the body cannot be read: {reason}") from error
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        raise describe_validation(error) from error
    for name in service.unknown_fields.fresh(check_extra(body.model_extra or {})):
        LOGGER.warning("unknown field %r in a body of %s is ignored; told once", name, request.path)
    return body
