"""CEL rules of a CRD (`x-kubernetes-validations`), compiled once and run on every write."""

import functools
from dataclasses import dataclass
from typing import Any

import cel

from pagefleet_localcluster.api.errors import Cause
from pagefleet_localcluster.api.validation import show

Schema = dict[str, Any]
MAX_PROGRAMS = 1024


class RuleError(Exception):
    """A rule that does not compile, or fails while it runs."""


_RUN_ERRORS = (RuleError, ValueError, TypeError, RuntimeError, LookupError)


@functools.lru_cache(maxsize=MAX_PROGRAMS)
def compile_rule(expression: str) -> Any:
    """A reusable program. Raises RuleError when it does not parse."""
    try:
        return cel.compile(expression)
    except ValueError as error:
        raise RuleError(str(error)[:500]) from error


def rules_only(schema: Schema) -> Schema | None:
    """The branches of a schema that carry rules, with what running them needs; None when there are none."""
    kept: Schema = {}
    for name in ("items", "additionalProperties"):
        below = rules_only(schema[name]) if isinstance(schema.get(name), dict) else None
        if below is not None:
            kept[name] = below
    properties = {name: rules_only(child) for name, child in (schema.get("properties") or {}).items()}
    found = {name: below for name, below in properties.items() if below is not None}
    if found:
        kept["properties"] = found
    if schema.get("x-kubernetes-validations"):
        kept["x-kubernetes-validations"] = schema["x-kubernetes-validations"]
        kept["x-declared"] = list(properties)
    if not kept:
        return None
    return kept | {key: value for key, value in schema.items() if key.startswith("x-kubernetes-list")}


@dataclass(frozen=True)
class _Place:
    value: Any
    old: Any
    has_old: bool
    path: str


def run_rules(obj: Any, old: Any, schema: Schema) -> list[Cause]:
    """Every rule of the schema that the object breaks. `old` is the stored object, None on create:
    rules that name `oldSelf` run only where an old value exists."""
    causes: list[Cause] = []
    _walk(_Place(obj, old, old is not None, ""), schema, causes)
    return causes


def _walk(place: _Place, schema: Schema, causes: list[Cause]) -> None:
    value, old = place.value, place.old
    if value is None:
        return
    for rule in schema.get("x-kubernetes-validations") or ():
        _run(rule, place, schema, causes)
    if isinstance(value, dict):
        old_map = old if isinstance(old, dict) else {}
        properties, extra = schema.get("properties") or {}, schema.get("additionalProperties")
        for key in sorted(value):
            child = properties.get(key, extra)
            if isinstance(child, dict):
                path = f"{place.path}.{key}" if place.path else key
                _walk(_Place(value[key], old_map.get(key), key in old_map, path), child, causes)
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        keys = schema.get("x-kubernetes-list-map-keys") or ()
        olds = _by_keys(old, keys) if schema.get("x-kubernetes-list-type") == "map" else {}
        for index, item in enumerate(value):
            found = olds.get(_keys_of(item, keys)) if isinstance(item, dict) else None
            _walk(_Place(item, found, found is not None, f"{place.path}[{index}]"), schema["items"], causes)


def _keys_of(item: dict[str, Any], keys: Any) -> tuple[str, ...]:
    return tuple(str(item.get(key)) for key in keys)


def _by_keys(old: Any, keys: Any) -> dict[tuple[str, ...], Any]:
    return {_keys_of(item, keys): item for item in old if isinstance(item, dict)} if isinstance(old, list) else {}


def _run(rule: dict[str, Any], place: _Place, schema: Schema, causes: list[Cause]) -> None:
    expression = rule["rule"]
    context: dict[str, Any] = {"self": _visible(place.value, schema, place.path)}
    if "oldSelf" in expression:
        if not place.has_old:
            return
        context["oldSelf"] = _visible(place.old, schema, place.path)
    path = place.path + (rule.get("fieldPath") or "") or "<nil>"
    try:
        held = compile_rule(expression).execute(context)
    except _RUN_ERRORS as error:
        why = f"no such key: {error.args[0]}" if isinstance(error, KeyError) else str(error)[:300]
        text = f"Invalid value: {_shown(place.value)}: {why} evaluating rule: "
        causes.append(Cause(field=path, message=text + (rule.get("message") or expression)))
        return
    if held is True:
        return
    message = _message(rule, context)
    reason = rule.get("reason") or "FieldValueInvalid"
    scalar = "" if isinstance(place.value, dict | list) else f"{show(place.value)}: "
    causes.append(Cause(field=path, message=f"Invalid value: {scalar}{message}", reason=reason))


def _message(rule: dict[str, Any], context: dict[str, Any]) -> str:
    if rule.get("messageExpression"):
        try:
            return str(compile_rule(rule["messageExpression"]).execute(context))
        except _RUN_ERRORS:
            return rule.get("message") or f"failed rule: {rule['rule']}"
    return rule.get("message") or f"failed rule: {rule['rule']}"


def _shown(value: Any) -> str:
    return '"object"' if isinstance(value, dict) else '"array"' if isinstance(value, list) else show(value)


def _visible(value: Any, schema: Schema, path: str) -> Any:
    """What a rule may see: no undeclared field, and at the root of metadata only name and generateName."""
    if not isinstance(value, dict) or path:
        return value
    meta = value.get("metadata") or {}
    declared = schema.get("x-declared") or schema.get("properties") or ()
    seen = {key: item for key, item in value.items() if key in declared}
    return {**seen, "metadata": {key: meta[key] for key in ("name", "generateName") if key in meta}}
