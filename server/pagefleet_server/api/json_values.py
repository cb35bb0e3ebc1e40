"""How many values a JSON document has, counted without making one: reading them takes time by their number."""

import re

from pagefleet_server.api.errors import BadRequestError

MAX_CONTAINERS = 16 * 1024
"""Objects and lists beside the lists of token ids. 4096 messages, each with a list of one part, have 12,289."""
MAX_VALUES = 48 * 1024
"""Values of any kind beside them; 4096 messages, each with two parts, have 36,865."""
MAX_STRINGS = 2 * MAX_VALUES
"""Keys and values."""

_MARKS = b'"[{,'
_NO_MARKS = bytes(sorted(set(range(256)) - set(_MARKS)))
_STRING = re.compile(rb'"[^"]*"')


def check_strings(raw: bytes) -> None:
    """Raises BadRequestError for JSON with too many strings, before any is made. Cheap for texts."""
    if raw.count(b'"') > 2 * MAX_STRINGS and _marks(raw).count(b'"') > 2 * MAX_STRINGS:
        raise BadRequestError(f"the body has too many texts and keys; at most {MAX_STRINGS} are read")


def check_values(raw: bytes) -> None:
    """Raises BadRequestError for JSON with too many values. Cheap for texts; brackets in texts do not count."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_CONTAINERS and raw.count(b",") <= MAX_VALUES - MAX_CONTAINERS:
        return
    marks = _marks(raw)
    num_strings = marks.count(b'"') // 2
    bare = _STRING.sub(b"", marks) if num_strings <= MAX_STRINGS else b""
    num_commas = bare.count(b",")
    num_containers = len(bare) - num_commas
    if num_strings > MAX_STRINGS or num_containers > MAX_CONTAINERS or num_commas + num_containers > MAX_VALUES:
        raise BadRequestError(
            f"the body has too many JSON values; beside token ids at most {MAX_VALUES} are read, of them "
            f"{MAX_CONTAINERS} objects and lists"
        )


def _marks(raw: bytes) -> bytes:
    """Quotes, and what stands for values in and outside of texts; no quote that is part of a text."""
    return raw.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
