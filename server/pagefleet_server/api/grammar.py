"""What a request says about the shape of its output, as one grammar for the engine. Fails closed: 400."""

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from pagefleet_server.api.errors import BadRequestError

MAX_GRAMMAR_CHARS = 64 * 1024
MAX_CHOICES = 1024
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""On one line, so that a model cannot go on with white space for ever."""
STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")


Shape = tuple[str, str]
"""Kind in STRUCTURES, and its source as text."""


def read_grammar(
    response_format: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None
) -> Shape | None:
    """What is asked for, None for free text. Raises BadRequestError; cheap."""
    given = [
        *_read_response_format(response_format or {"type": "text"}),
        *_read_structured_outputs(structured_outputs or {}),
    ]
    if len(given) > 1:
        raise BadRequestError(f"only one shape can be asked for; given are {', '.join(kind for kind, _ in given)}")
    if given and len(given[0][1]) > MAX_GRAMMAR_CHARS:
        raise BadRequestError(f"{given[0][0]}: {len(given[0][1])} characters; at most {MAX_GRAMMAR_CHARS} are read")
    return given[0] if given else None


def compile_grammar(kind: str, source: str) -> str:
    """The engine's grammar. Takes milliseconds, more for large ones: call it in a thread. Raises BadRequestError."""
    try:
        grammar = _convert(kind, source)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"{kind}: {str(error)[:300]}", code="invalid_grammar") from error
    complaint = LLMatcher.validate_grammar(grammar)
    if complaint:
        raise BadRequestError(f"{kind}: {complaint[:300]}", code="invalid_grammar")
    return grammar


def _convert(kind: str, source: str) -> str:
    match kind:
        case "json" | "json_object":
            return LLMatcher.grammar_from_json_schema(source, defaults=JSON_STYLE)
        case "regex":
            return LLMatcher.grammar_from_regex(source)
        case "choice":
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(source))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
    return LLMatcher.grammar_from_lark(_to_lark(source))


def _to_lark(source: str) -> str:
    """Lark as it is, GBNF rewritten."""
    try:
        return any_to_lark(source)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(str(error) or type(error).__name__) from error


def _read_response_format(given: Mapping[str, Any]) -> list[Shape]:
    match given:
        case {"type": "text"}:
            return []
        case {"type": "json_object"}:
            return [("json_object", '{"type": "object"}')]
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return [("json", json.dumps(schema))]
    raise BadRequestError(
        'response_format must be {"type": "text"}, {"type": "json_object"}, or '
        '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
        param="response_format",
    )


def _read_structured_outputs(given: Mapping[str, Any]) -> list[Shape]:
    asked = [(name, value) for name, value in given.items() if value is not None]
    return [(name, _read_structure(name, value)) for name, value in asked if (name, value) != ("json_object", False)]


def _read_structure(name: str, value: Any) -> str:
    match name, value:
        case "json", str(schema):
            return schema
        case "json", dict(schema):
            return json.dumps(schema)
        case "json_object", True:
            return '{"type": "object"}'
        case (("regex" | "grammar"), str(source)) if source:
            return source
        case "choice", list(choices) if choices and len(choices) <= MAX_CHOICES:
            if all(isinstance(choice, str) and choice for choice in choices):
                return json.dumps(choices)
    if name not in STRUCTURES:
        raise BadRequestError(f"structured_outputs: {name[:40]!r} is none of {', '.join(STRUCTURES)}")
    raise BadRequestError(
        f"structured_outputs: {name} has a value that cannot be used; json takes a schema, json_object true, regex and "
        f"grammar a text, choice a list of up to {MAX_CHOICES} texts",
        param=f"structured_outputs.{name}",
    )
