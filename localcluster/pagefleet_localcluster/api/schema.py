"""What a structural schema does to an object before it is checked: unknown fields go, defaults come.

The functions change the object that they are given: the request's own copy, never a stored one."""

import copy
from typing import Any

from pagefleet_localcluster.objects import canonical_quantity

Schema = dict[str, Any]
Json = dict[str, Any]

PRESERVE = "x-kubernetes-preserve-unknown-fields"
_TYPE_META = frozenset({"apiVersion", "kind", "metadata"})


def prune(obj: Json, schema: Schema) -> list[str]:
    """Removes fields that the schema does not know; returns their paths (`spec.bogus`).

    `apiVersion`, `kind` and `metadata` at the root always stay."""
    unknown: list[str] = []
    _prune(obj, schema, "", unknown, _TYPE_META)
    return unknown


def _prune(value: Any, schema: Schema, path: str, unknown: list[str], keep: frozenset[str] = frozenset()) -> None:
    if isinstance(value, dict):
        properties = schema.get("properties") or {}
        extra = schema.get("additionalProperties")
        preserve = schema.get(PRESERVE, False)
        if schema.get("x-kubernetes-embedded-resource"):
            keep = _TYPE_META
        for key in list(value):
            child = f"{path}.{key}" if path else key
            if key in properties:
                _prune(value[key], properties[key], child, unknown)
            elif key in keep:
                continue
            elif isinstance(extra, dict):
                _prune(value[key], extra, child, unknown)
            elif not preserve and extra is not True:
                del value[key]
                unknown.append(child)
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for index, item in enumerate(value):
            _prune(item, schema["items"], f"{path}[{index}]", unknown)


def apply_defaults(value: Any, schema: Schema) -> None:
    """Fills absent fields from `default`; a null where null is not allowed counts as absent.

    A default object is itself filled from the defaults below it."""
    if isinstance(value, dict):
        properties = schema.get("properties") or {}
        for key, child in properties.items():
            if "default" in child and (key not in value or (value[key] is None and not child.get("nullable"))):
                value[key] = copy.deepcopy(child["default"])
            if key in value:
                apply_defaults(value[key], child)
        extra = schema.get("additionalProperties")
        if isinstance(extra, dict):
            for key, item in value.items():
                if key not in properties:
                    apply_defaults(item, extra)
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for item in value:
            apply_defaults(item, schema["items"])


def drop_nulls(value: Any, schema: Schema | None) -> None:
    """Removes nulls, as reading into a typed built-in object does; in a map of strings a null reads as an empty one."""
    if isinstance(value, dict):
        properties = (schema or {}).get("properties") or {}
        for key, item in list(value.items()):
            below = child_schema(schema, key)
            if item is not None:
                drop_nulls(item, below)
            elif below is not None and below.get("type") == "string" and key not in properties:
                value[key] = ""
            else:
                del value[key]
    elif isinstance(value, list):
        for item in value:
            drop_nulls(item, (schema or {}).get("items"))


def spell_quantities(value: Any, schema: Schema | None) -> None:
    """Writes the quantities of resource lists (`limits`, `capacity` ...) in their one spelling."""
    if isinstance(value, dict):
        extra = (schema or {}).get("additionalProperties")
        for key, item in value.items():
            if isinstance(extra, dict) and extra.get("format") == "quantity":
                value[key] = canonical_quantity(item)
            else:
                spell_quantities(item, child_schema(schema, key))
    elif isinstance(value, list):
        for item in value:
            spell_quantities(item, (schema or {}).get("items"))


def drop_empty(value: Any, schema: Schema | None) -> None:
    """Removes the empty lists and maps that typed built-in objects do not carry.

    An empty object of a type (`emptyDir: {}`) says something and stays. A null in a list of objects is an empty one."""
    if isinstance(value, dict):
        for key, item in list(value.items()):
            below = child_schema(schema, key)
            drop_empty(item, below)
            if not item and ((_is_collection(item, below) and key not in _KEPT_EMPTY) or key in _OMITTED_ZEROS):
                del value[key]
    elif isinstance(value, list):
        below = (schema or {}).get("items")
        if below and below.get("type") == "object":
            value[:] = [{} if item is None else item for item in value]
        for item in value:
            drop_empty(item, below)


_OMITTED_ZEROS = frozenset(
    {
        "minReadySeconds",
        "paused",
        "initialDelaySeconds",
        "hostNetwork",
        "hostPID",
        "hostIPC",
        "hostPort",
        "stdin",
        "tty",
    }
    | {"workingDir", "readOnly", "subPath"}
)
"""Fields of built-in types that are not stored when they say what their absence says; others keep a zero."""
_KEPT_EMPTY = frozenset({"rules", "endpoints", "ports", "containers"})


def _is_collection(value: Any, schema: Schema | None) -> bool:
    if isinstance(value, list):
        return (schema or {}).get("type") == "array"
    return isinstance(value, dict) and "additionalProperties" in (schema or {})


def child_schema(schema: Schema | None, key: str) -> Schema | None:
    """The schema of one field, or None where the schema says nothing."""
    if schema is None:
        return None
    found = (schema.get("properties") or {}).get(key)
    if found is not None:
        return found  # type: ignore[no-any-return]
    extra = schema.get("additionalProperties")
    return extra if isinstance(extra, dict) else None
