"""Structural schemas of the built-in types, in the form that CRDs use, read from `builtin_types.txt`.

One form for both means one implementation of defaulting, pruning, validation, merging and ownership."""

import functools
import json
from importlib import resources
from typing import Any

Schema = dict[str, Any]

_SCALARS: dict[str, Schema] = {
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "time": {"type": "string", "format": "date-time", "nullable": True},
    "microtime": {"type": "string", "format": "date-time", "nullable": True},
    "intstr": {"x-kubernetes-int-or-string": True},
    "quantity": {"x-kubernetes-int-or-string": True, "format": "quantity"},
    "object": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
}


class BuiltinTypes:
    """Schemas by type name. Schemas are shared between their users: read them, never change them."""

    def __init__(self, text: str) -> None:
        self._lines = {
            line.split(" ", 1)[0].removesuffix("@atomic"): line
            for line in text.splitlines()
            if line and not line.startswith("#")
        }
        self._schemas: dict[str, Schema] = {}

    def names(self) -> list[str]:
        """Every type of the table."""
        return list(self._lines)

    def schema(self, name: str) -> Schema:
        """The schema of a type. Raises KeyError for a name that the table lacks."""
        known = self._schemas.get(name)
        if known is not None:
            return known
        head, *fields = self._lines[name].split(" ")
        schema: Schema = {"type": "object", "properties": {}, "x-type-name": name}
        self._schemas[name] = schema
        if head.endswith("@atomic"):
            schema["x-kubernetes-map-type"] = "atomic"
        for field in fields:
            self._add_field(schema, field)
        return schema

    def _add_field(self, schema: Schema, text: str) -> None:
        field, _, default = text.partition("=")
        name, _, rest = field.partition(":")
        rest, _, enum = rest.partition("|")
        type_text, _, merge = rest.partition("@")
        if name.endswith("!"):
            name = name[:-1]
            schema.setdefault("required", []).append(name)
        value = dict(self._type(type_text))
        if value.get("type") == "array":
            value.update(_list_merge(merge))
        elif merge == "atomic":
            value["x-kubernetes-map-type"] = "atomic"
        if enum:
            value["enum"] = enum.split("/")
        if default:
            value["default"] = json.loads(default)
        schema["properties"][name] = value

    def _type(self, text: str) -> Schema:
        if text.startswith("["):
            return {"type": "array", "items": self._type(text[1:-1])}
        if text.startswith("{"):
            return {"type": "object", "additionalProperties": self._type(text[1:-1])}
        return _SCALARS[text] if text in _SCALARS else self.schema(text)


def _list_merge(merge: str) -> Schema:
    if not merge:
        return {"x-kubernetes-list-type": "atomic"}
    if merge == "set":
        return {"x-kubernetes-list-type": "set"}
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": merge.split(",")}


@functools.cache
def builtin_types() -> BuiltinTypes:
    """The table shipped with the package (parsed once a process)."""
    return BuiltinTypes(resources.files(__package__).joinpath("builtin_types.txt").read_text())
