"""The grammar of an output that must be a tool call, in the way that the model writes calls."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pagefleet_server.api.parsers.tools import HermesParser

FORCING: Final = frozenset({"hermes", "json"})
"""Kinds of tool parsers whose calls can be forced."""
STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def forced_call(kind: str, functions: Sequence[tuple[str, Mapping[str, Any] | None]]) -> tuple[str, str]:
    """(kind of grammar, source) of one call to one of `functions` (name, schema of its arguments). kind in FORCING."""
    key = "arguments" if kind == "hermes" else "parameters"
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"type": "object"} if schema is None else schema},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name, schema in functions
    ]
    one_call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if kind == "json":
        return "json", json.dumps(one_call)
    styled = json.dumps({"x-guidance": STYLE, **one_call})
    return "grammar", f'start: "{HermesParser.OPEN}\\n" call "\\n{HermesParser.CLOSE}"\ncall: %json {styled}'
