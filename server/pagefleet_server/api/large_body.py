"""Large JSON bodies, read without holding the event loop for long.

Validation is C code that keeps the interpreter to itself, in a thread as well, and its time grows with the number of
JSON values, not of bytes: a prompt of megabytes is one value. So lists of token ids are read apart, in slices, and of
everything else there may be a bounded number of values. Between any two steps over all bytes the loop has a turn.
"""

import asyncio
import re
from codecs import BOM_UTF8
from typing import Annotated, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from pagefleet_server.api.errors import BadRequestError, describe_validation
from pagefleet_server.api.json_values import check_strings, check_values
from pagefleet_server.api.protocol.sampling import MAX_ALLOWED_IDS

Body = TypeVar("Body", bound=BaseModel)

SMALL_BYTES = 128 * 1024
"""Smaller bodies are validated at once."""
SLICE_BYTES = 16 * 1024
"""Of a list of token ids, between two turns of the loop; 3,000 to 8,000 ids. A probe takes three or four turns."""
MAX_FIELDS = 1024
"""Of the body itself: each field that nobody knows is looked at."""
ID_FIELDS = ("prompt", "input", "tokens", "allowed_token_ids")
"""What may be a list of token ids, in the order of the routes."""
MAX_IDS = {"allowed_token_ids": MAX_ALLOWED_IDS}
"""Of a field that is one list, and not bounded by the context."""
MAX_ID_LISTS = 1024
PLACEHOLDER = msgspec.Raw(b"[0]")

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_document = msgspec.json.Decoder(dict[str, msgspec.Raw])
_flat = msgspec.json.Decoder(list[_TokenId])
_nested = msgspec.json.Decoder(list[Annotated[list[_TokenId], msgspec.Meta(min_length=1)]])
_OPENED = re.compile(rb"[ \t\r\n]*\[")
_GAP = re.compile(rb"[ \t\r\n]*(,)?[ \t\r\n]*")


async def parse_body(raw: bytes, kind: type[Body]) -> Body:
    """The validated body. Raises BadRequestError."""
    ids: dict[str, list[int] | list[list[int]]] = {}
    raw = raw.removeprefix(BOM_UTF8)  # files of some editors begin with it
    if len(raw) > SMALL_BYTES:
        check_strings(raw)
        await asyncio.sleep(0)
        try:
            document = _document.decode(raw)
            if len(document) > MAX_FIELDS:
                raise BadRequestError(f"the body has {len(document)} fields; at most {MAX_FIELDS} are read")
            for name in ID_FIELDS:
                if name in kind.model_fields and name in document and _begins_with_ids(document[name]):
                    await asyncio.sleep(0)  # each copy of megabytes takes some milliseconds
                    ids[name] = await read_ids(bytes(document[name]), name)
                    document[name] = PLACEHOLDER
            await asyncio.sleep(0)
            raw = msgspec.json.encode(document)
            del document
            await asyncio.sleep(0)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadRequestError(f"body: invalid JSON: {str(error)[:200]}") from error
        check_values(raw)
        await asyncio.sleep(0)
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        raise describe_validation(error) from error
    for name, value in ids.items():
        setattr(body, name, value)
    if len(raw) > SMALL_BYTES:
        await asyncio.sleep(0)
    return body


async def read_ids(raw: bytes, name: str) -> list[int] | list[list[int]]:
    """A list of token ids, or a list of such lists. Raises BadRequestError naming the field."""
    try:
        if name in MAX_IDS and raw.count(b",") >= MAX_IDS[name]:
            raise BadRequestError(f"{name}: at most {MAX_IDS[name]} token ids are allowed", param=name)
        if raw.count(b"[") == 1:
            return await _read_flat(raw)
        if name in MAX_IDS:
            raise BadRequestError(f"{name}: no list of token ids", param=name)
        if raw.count(b"[") > MAX_ID_LISTS + 1:
            raise BadRequestError(f"{name}: more than {MAX_ID_LISTS} lists of token ids", param=name)
        return await _read_nested(raw)
    except msgspec.MsgspecError as error:
        raise BadRequestError(f"{name}: no list of token ids: {str(error)[:200]}", param=name) from error


async def _read_flat(raw: bytes) -> list[int]:
    """Cut at commas: nothing but numbers can stand between them."""
    ids: list[int] = []
    start, stop = raw.index(b"[") + 1, raw.rindex(b"]")
    while start < stop:
        comma = raw.find(b",", start + SLICE_BYTES, stop)
        end = stop if comma < 0 else comma
        piece = _flat.decode(b"[" + raw[start:end] + b"]")
        if not piece or end == stop - 1:
            raise msgspec.DecodeError("a number is missing beside a comma")
        ids += piece
        start = end + 1
        await asyncio.sleep(0)
    return ids


async def _read_nested(raw: bytes) -> list[list[int]]:
    """A long list by itself, short ones together, cut behind closing brackets: nothing else can they close."""
    lists: list[list[int]] = []
    inside = raw.strip()[1:-1]
    start = 0
    while start < len(inside):
        end = inside.find(b"]", start) + 1
        if end - start > SLICE_BYTES:
            if not _OPENED.match(inside, start, end):
                raise msgspec.DecodeError("there is something else between the lists")
            lists.append(await _read_flat(inside[start:end]))
            if not lists[-1]:
                raise msgspec.DecodeError("a list is empty")
        else:
            end = inside.rfind(b"]", start, start + SLICE_BYTES) + 1 or len(inside)
            lists += _nested.decode(b"[" + inside[start:end] + b"]")
        gap = _GAP.match(inside, end)
        assert gap is not None  # it may be empty
        start = gap.end()
        if (gap[1] is None) != (start == len(inside)):
            raise msgspec.DecodeError("lists must have one comma between them")
        await asyncio.sleep(0)
    return lists


def _begins_with_ids(raw: msgspec.Raw) -> bool:
    """A list, but not of texts."""
    return re.match(rb"\s*\[\s*(\[\s*)?[0-9\-]", memoryview(raw)) is not None
