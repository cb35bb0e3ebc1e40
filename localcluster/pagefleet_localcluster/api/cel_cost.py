"""A coarse estimate of what a CEL rule may cost, after the API server's: sizes from the schema's bounds.

Only what multiplies is counted: macros over lists and maps, and functions over strings. Where a bound is absent, the
largest request stands in. Meant to refuse what a real server refuses for lack of bounds, not to match its numbers."""

import re
from typing import Any

Schema = dict[str, Any]
RULE_BUDGET = 10_000_000.0
TOTAL_BUDGET = 100_000_000.0
_MAX_REQUEST_BYTES = 3 * 2**20
_MACROS = re.compile(r"\.(all|exists|exists_one|map|filter)\(")
_STRING_CALLS = re.compile(r"\.(matches|contains|startsWith|endsWith|find|split|replace|lowerAscii|upperAscii)\(")
_REGEX = re.compile(r"""\.matches\(\s*(?:'([^']*)'|"([^"]*)")""")
_MAKES_TEXT = re.compile(r"\bstring\(|\.join\(|\.format\(")
_CHAIN = re.compile(r"(?<![\w.])(?:self|oldSelf)((?:\.[A-Za-z_]\w*)*)")


def max_items(schema: Schema) -> float:
    """How many items a list or map can hold."""
    bound = schema.get("maxItems", schema.get("maxProperties"))
    if bound is not None:
        return float(bound)
    items = schema.get("items") or schema.get("additionalProperties")
    return _MAX_REQUEST_BYTES / _least_bytes(items if isinstance(items, dict) else {})


def _least_bytes(schema: Schema) -> int:
    """The shortest JSON of one item, with its comma."""
    return {"object": 3, "array": 3, "string": 3, "boolean": 5}.get(schema.get("type", ""), 2)


def _max_text(schema: Schema) -> float:
    """The longest string at or anywhere below a schema."""
    if schema.get("type") == "string":
        if "maxLength" in schema:
            return float(schema["maxLength"]) * 4
        if schema.get("enum"):
            return float(max(len(str(value)) for value in schema["enum"]))
        return {"date-time": 25.0, "date": 10.0, "duration": 32.0}.get(schema.get("format", ""), _MAX_REQUEST_BYTES)
    below = [*(schema.get("properties") or {}).values()]
    below += [schema[key] for key in ("items", "additionalProperties") if isinstance(schema.get(key), dict)]
    return max((_max_text(child) for child in below), default=0.0)


def estimate(expression: str, schema: Schema) -> float:
    """The cost of one evaluation on the largest object that the schema allows."""
    targets = [_target(schema, match[1].split(".")[1:]) for match in _CHAIN.finditer(expression)]
    text = max((_max_text(target) for target in targets), default=0.0)
    size = max((max_items(target) for target in targets if _is_collection(target)), default=1.0)
    cost = float(len(expression))
    if _STRING_CALLS.search(expression):
        patterns = [len(match[1] or match[2] or "") for match in _REGEX.finditer(expression)]
        cost += text * 0.1 * max(1.0, max(patterns, default=0) * 0.25)
    if _MAKES_TEXT.search(expression):
        cost += _MAX_REQUEST_BYTES * 1e4  # a made string has no bound
    return cost * size if _MACROS.search(expression) else cost


def _is_collection(schema: Schema) -> bool:
    return schema.get("type") == "array" or isinstance(schema.get("additionalProperties"), dict)


def _target(schema: Schema, fields: list[str]) -> Schema:
    """The schema at the end of a chain, as far as it goes."""
    for name in fields:
        found = (schema.get("properties") or {}).get(name)
        if found is None:
            break
        schema = found
    return schema
