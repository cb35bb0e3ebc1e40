"""Structural validation: an object against its schema, with Kubernetes' messages and order."""

import datetime
import functools
import json
import re
from typing import Any

from pagefleet_localcluster.api.errors import Cause
from pagefleet_localcluster.objects import is_quantity

Schema = dict[str, Any]
MAX_PATTERN_CACHE = 1024
# Other keyed lists of built-in types may repeat a key: a second env entry of a name hides the first.
_UNIQUE_BUILTINS = frozenset({"Container", "EphemeralContainer", "Volume", "VolumeMount", "ServicePort"})
QUANTITY_TEXT = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"


def validate(value: Any, schema: Schema, path: str = "") -> list[Cause]:
    """All faults of a value, fields in alphabetical order, as Kubernetes lists them."""
    causes: list[Cause] = []
    _validate(value, schema, path, causes)
    return causes


def _validate(value: Any, schema: Schema, path: str, causes: list[Cause]) -> None:
    if value is None and schema.get("nullable"):
        return
    if not _type_fits(value, schema):
        causes.append(_type_fault(value, schema, path))
        return
    if schema.get("format") == "quantity" and not is_quantity(value):
        text = f"Invalid value: {show(value)}: {QUANTITY_TEXT}"
        causes.append(Cause(field=path, message=text, reason="FieldValueTypeInvalid"))
        return
    if "enum" in schema and value not in schema["enum"]:
        values = ", ".join(json.dumps(v) for v in schema["enum"])
        text = f"Unsupported value: {show(value)}: supported values: {values}"
        causes.append(Cause(field=path, message=text, reason="FieldValueNotSupported"))
        return
    if isinstance(value, dict):
        _validate_object(value, schema, path, causes)
    elif isinstance(value, list):
        _validate_list(value, schema, path, causes)
    elif isinstance(value, str):
        _validate_string(value, schema, path, causes)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _validate_number(value, schema, path, causes)
    for part in schema.get("allOf") or ():
        _validate(value, part, path, causes)
    if schema.get("anyOf") and all(validate(value, part, path) for part in schema["anyOf"]):
        _fault(causes, path, value, f"{path} in body must validate at least one schema (anyOf)")
    if schema.get("oneOf") and sum(not validate(value, part, path) for part in schema["oneOf"]) != 1:
        _fault(causes, path, value, f"{path} in body must validate one and only one schema (oneOf)")
    if schema.get("not") and not validate(value, schema["not"], path):
        _fault(causes, path, value, f"{path} in body must not validate the schema (not)")


def _type_fits(value: Any, schema: Schema) -> bool:
    if schema.get("x-kubernetes-int-or-string"):
        return isinstance(value, str | int | float) and not isinstance(value, bool)
    match schema.get("type"):
        case None:
            return True
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            return whole and not isinstance(value, bool)
        case _:
            return isinstance(value, int | float) and not isinstance(value, bool)


def type_name(value: Any) -> str:
    """The JSON type of a value as messages name it."""
    names = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    return names.get(type(value), "null")


def _type_fault(value: Any, schema: Schema, path: str) -> Cause:
    wanted = "integer,string" if schema.get("x-kubernetes-int-or-string") else schema["type"]
    found = json.dumps(type_name(value))
    text = f"Invalid value: {found}: {path} in body must be of type {wanted}: {found}"
    return Cause(field=path, message=text, reason="FieldValueTypeInvalid")


def show(value: Any) -> str:
    """A value inside a message: compact JSON."""
    return json.dumps(value, separators=(",", ":"))


def _fault(causes: list[Cause], path: str, value: Any, text: str) -> None:
    causes.append(Cause(field=path, message=f"Invalid value: {show(value)}: {text}"))


def _validate_object(value: dict[str, Any], schema: Schema, path: str, causes: list[Cause]) -> None:
    properties = schema.get("properties") or {}
    extra = schema.get("additionalProperties")
    required = schema.get("required") or ()
    for key in sorted({*value, *required}):
        child = _join(path, key)
        if key not in value:
            causes.append(Cause(field=child, message="Required value", reason="FieldValueRequired"))
        elif key in properties:
            _validate(value[key], properties[key], child, causes)
        elif isinstance(extra, dict):
            _validate(value[key], extra, child, causes)
    most, least = schema.get("maxProperties"), schema.get("minProperties")
    if most is not None and len(value) > most:
        text = f"Too many: {len(value)}: must have at most {most} items"
        causes.append(Cause(field=path, message=text, reason="FieldValueTooMany"))
    if least is not None and len(value) < least:
        _fault(causes, path, value, f"{path} in body should have at least {least} properties")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _validate_list(value: list[Any], schema: Schema, path: str, causes: list[Cause]) -> None:
    items = schema.get("items")
    most, least = schema.get("maxItems"), schema.get("minItems")
    if most is not None and len(value) > most:
        text = f"Too many: {len(value)}: must have at most {most} items"
        causes.append(Cause(field=path, message=text, reason="FieldValueTooMany"))
    if least is not None and len(value) < least:
        _fault(causes, path, len(value), f"{path} in body should have at least {least} items")
    if isinstance(items, dict):
        for index, item in enumerate(value):
            _validate(item, items, f"{path}[{index}]", causes)
    _validate_unique(value, schema, path, causes)


def _validate_unique(value: list[Any], schema: Schema, path: str, causes: list[Cause]) -> None:
    kind = schema.get("x-kubernetes-list-type")
    if kind not in ("map", "set"):
        return
    builtin = (schema.get("items") or {}).get("x-type-name")
    if builtin and builtin not in _UNIQUE_BUILTINS:
        return
    seen: set[str] = set()
    for index, item in enumerate(value):
        shown: Any = item
        if kind == "map":
            if not isinstance(item, dict):
                continue
            shown = {key: item[key] for key in schema.get("x-kubernetes-list-map-keys") or () if key in item}
        where = f"{path}[{index}]"
        if kind == "map" and len(shown) == 1 and builtin:
            [(key, shown)] = shown.items()  # built-in types name the key itself
            where += f".{key}"
        text = show(shown)
        if text in seen:
            causes.append(Cause(field=where, message=f"Duplicate value: {text}", reason="FieldValueDuplicate"))
        seen.add(text)


def _validate_string(value: str, schema: Schema, path: str, causes: list[Cause]) -> None:
    most, least, pattern = schema.get("maxLength"), schema.get("minLength"), schema.get("pattern")
    if most is not None and len(value) > most:
        text = f"Too long: may not be more than {most} bytes"
        causes.append(Cause(field=path, message=text, reason="FieldValueTooLong"))
    if least is not None and len(value) < least:
        _fault(causes, path, value, f"{path} in body should be at least {least} chars long")
    if pattern is not None and not compiled(pattern).search(value):
        _fault(causes, path, value, f"{path} in body should match '{pattern}'")
    if schema.get("format") == "date-time" and not is_date_time(value):
        found = show(value)
        text = f"Invalid value: {found}: {path} in body must be of type date-time: {found}"
        causes.append(Cause(field=path, message=text, reason="FieldValueTypeInvalid"))


@functools.lru_cache(maxsize=MAX_PATTERN_CACHE)
def compiled(pattern: str) -> re.Pattern[str]:
    r"""A schema's pattern; Go's `$` is the very end of the text, which Python writes `\Z`."""
    return re.compile(pattern[:-1] + r"\Z" if pattern.endswith("$") and not pattern.endswith(r"\$") else pattern)


def is_date_time(value: str) -> bool:
    """Whether the text is an RFC 3339 time with its zone."""
    try:
        return datetime.datetime.fromisoformat(value).tzinfo is not None and "T" in value.upper()
    except ValueError:
        return False


def _validate_number(value: float, schema: Schema, path: str, causes: list[Cause]) -> None:
    most, least, step = schema.get("maximum"), schema.get("minimum"), schema.get("multipleOf")
    if least is not None and (value <= least if schema.get("exclusiveMinimum") else value < least):
        relation = "greater than" if schema.get("exclusiveMinimum") else "greater than or equal to"
        _fault(causes, path, value, f"{path} in body should be {relation} {least}")
    if most is not None and (value >= most if schema.get("exclusiveMaximum") else value > most):
        relation = "less than" if schema.get("exclusiveMaximum") else "less than or equal to"
        _fault(causes, path, value, f"{path} in body should be {relation} {most}")
    if step and value % step:
        _fault(causes, path, value, f"{path} in body should be a multiple of {step}")
    if schema.get("format") == "int32" and not -(2**31) <= value < 2**31:
        _fault(causes, path, value, f"{path} in body must be of type int32: {show(value)}")
