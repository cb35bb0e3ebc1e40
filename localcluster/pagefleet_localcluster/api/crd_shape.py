"""Whether what stands in a CRD as a schema is one: each keyword has its type, schemas hold schemas."""

import re
from collections.abc import Iterator
from typing import Any

from pagefleet_localcluster.api.errors import Cause
from pagefleet_localcluster.api.validation import compiled, show, type_name

_TEXTS = frozenset({"type", "format", "pattern", "description", "title", "x-kubernetes-list-type"})
_TEXTS |= {"x-kubernetes-map-type"}
_COUNTS = frozenset({"maxLength", "minLength", "maxItems", "minItems", "maxProperties", "minProperties"})
_NUMBERS = frozenset({"maximum", "minimum", "multipleOf"})
_FLAGS = frozenset({"nullable", "uniqueItems", "exclusiveMaximum", "exclusiveMinimum"})
_FLAGS |= {f"x-kubernetes-{name}" for name in ("preserve-unknown-fields", "int-or-string", "embedded-resource")}
_TEXT_LISTS = frozenset({"required", "x-kubernetes-list-map-keys"})
_SCHEMA_LISTS = frozenset({"allOf", "anyOf", "oneOf"})
_TYPES = ("array", "boolean", "integer", "number", "object", "string")


def check_shape(schema: Any, path: str) -> Iterator[Cause]:
    """Every place at or below `path` that no schema can have."""
    if not isinstance(schema, dict):
        yield _wrong(path, schema, "a schema")
        return
    for name, value in schema.items():
        where = f"{path}.{name}"
        wanted = _wanted(name, value)
        if wanted:
            yield _wrong(where, value, wanted)
        elif name == "properties":
            for key, child in value.items():
                yield from check_shape(child, f"{where}[{key}]")
        elif name in _SCHEMA_LISTS:
            for index, child in enumerate(value):
                yield from check_shape(child, f"{where}[{index}]")
        elif name in ("items", "not") or (name == "additionalProperties" and not isinstance(value, bool)):
            yield from check_shape(value, where)
        elif name == "x-kubernetes-validations":
            for index, rule in enumerate(value):
                yield from _check_rule(rule, f"{where}[{index}]")
    keys = schema.get("x-kubernetes-list-map-keys")
    if schema.get("x-kubernetes-list-type") == "map" and not keys:
        text = 'Required value: must not be empty if x-kubernetes-list-type is "map"'
        yield Cause(field=f"{path}.x-kubernetes-list-map-keys", message=text, reason="FieldValueRequired")


def _check_rule(rule: Any, path: str) -> Iterator[Cause]:
    if not isinstance(rule, dict):
        yield _wrong(path, rule, "a rule")
        return
    if not rule.get("rule"):
        text = "Required value: rule is not specified"
        yield Cause(field=f"{path}.rule", message=text, reason="FieldValueRequired")
    for name in ("rule", "message", "messageExpression", "fieldPath", "reason"):
        if name in rule and not isinstance(rule[name], str):
            yield _wrong(f"{path}.{name}", rule[name], "a string")


def _wanted(name: str, value: Any) -> str | None:
    """What a keyword's value should have been; None when it is right."""
    if name == "type":
        return None if value in _TYPES else f"one of {', '.join(_TYPES)}"
    if name in _TEXTS:
        return _wanted_text(name, value)
    if name in _COUNTS:
        return None if type(value) is int and value >= 0 else "a whole number of at least 0"
    if name in _NUMBERS:
        return None if type(value) in (int, float) else "a number"
    if name in _FLAGS:
        return None if isinstance(value, bool) else "true or false"
    if name in _TEXT_LISTS:
        fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return None if fits else "a list of strings"
    if name in _SCHEMA_LISTS or name in ("enum", "x-kubernetes-validations"):
        return None if isinstance(value, list) else "a list"
    if name == "properties":
        return None if isinstance(value, dict) else "an object"
    return None


def _wanted_text(name: str, value: Any) -> str | None:
    if not isinstance(value, str):
        return "a string"
    if name == "pattern":
        try:
            compiled(value)
        except re.error as error:
            return f"a regular expression: {error}"
    return None


def _wrong(field: str, value: Any, wanted: str) -> Cause:
    shown = f'"{type_name(value)}"' if isinstance(value, dict | list) else show(value)[:100]
    return Cause(field=field, message=f"Invalid value: {shown}: must be {wanted}", reason="FieldValueTypeInvalid")
