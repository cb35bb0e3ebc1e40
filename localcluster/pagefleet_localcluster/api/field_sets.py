"""Sets of field paths, and their `FieldsV1` form.

A path is a tuple of elements as FieldsV1 writes them: `f:NAME`, `k:{"name":"x"}` for an item of a keyed list,
`v:VALUE` for an item of a set. Source of the rules: structured-merge-diff v4."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pagefleet_localcluster.api.schema import Schema, child_schema

Path = tuple[str, ...]
FieldSet = set[Path]

# metadata that the API itself writes belongs to no manager
_UNOWNED = frozenset(
    {"name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "selfLink", "managedFields"}
    | {"deletionTimestamp", "deletionGracePeriodSeconds"}
)


def to_fields_v1(paths: Iterable[Path]) -> dict[str, Any]:
    """The nested form: a path that is a member and has members below carries `.`."""
    tree: dict[str, Any] = {}
    for path in sorted(paths):
        node = tree
        for depth, element in enumerate(path):
            if element not in node:
                node[element] = {}
            elif depth < len(path) - 1 and not node[element]:
                node[element]["."] = {}
            node = node[element]
    return tree


def from_fields_v1(tree: Mapping[str, Any]) -> FieldSet:
    """The paths of a nested form."""
    paths: FieldSet = set()
    _collect(tree, (), paths)
    return paths


def _collect(tree: Mapping[str, Any], prefix: Path, paths: FieldSet) -> None:
    for element, below in tree.items():
        if element == ".":
            paths.add(prefix)
        elif not below:
            paths.add((*prefix, element))
        else:
            _collect(below, (*prefix, element), paths)


def applied_fields(config: Mapping[str, Any], schema: Schema) -> FieldSet:
    """The fields that an applied object sets: its leaves, items of keyed lists, empty containers."""
    paths: FieldSet = set()
    _leaves(config, schema, (), paths)
    return {path for path in paths if owned(path)}


def all_fields(obj: Mapping[str, Any], schema: Schema) -> dict[Path, Any]:
    """Every field of an object, containers too, with its value (None for containers that are merged)."""
    paths: dict[Path, Any] = {}
    _values(obj, schema, (), paths)
    return {path: value for path, value in paths.items() if owned(path)}


def owned(path: Path) -> bool:
    """Whether managers own this path at all."""
    if path[0] in ("f:apiVersion", "f:kind") or path == ("f:metadata",):
        return False
    return not (path[0] == "f:metadata" and path[1][2:] in _UNOWNED)


def is_atomic(value: Any, schema: Schema | None) -> bool:
    """Whether the value is owned as a whole."""
    schema = schema or {}
    if isinstance(value, dict):
        return not value or schema.get("x-kubernetes-map-type") == "atomic"
    if isinstance(value, list):
        return not value or schema.get("x-kubernetes-list-type", "atomic") == "atomic"
    return True


def _is_granular(value: Any, schema: Schema | None) -> bool:
    """Whether a container of this kind is merged: filling an empty one changes only what is put into it."""
    schema = schema or {}
    if isinstance(value, dict):
        return schema.get("x-kubernetes-map-type") != "atomic"
    return isinstance(value, list) and schema.get("x-kubernetes-list-type", "atomic") != "atomic"


def element_of(item: Any, schema: Schema) -> str:
    """The path element of a list item under its list's schema (kind `map` or `set`)."""
    if schema.get("x-kubernetes-list-type") == "set":
        return "v:" + json.dumps(item, separators=(",", ":"))
    properties = (schema.get("items") or {}).get("properties") or {}
    keys = {}
    for key in sorted(schema["x-kubernetes-list-map-keys"]):
        found = item.get(key) if isinstance(item, dict) else None
        default = properties.get(key, {}).get("default")
        if found is not None or default is not None:
            keys[key] = default if found is None else found
    return "k:" + json.dumps(keys, separators=(",", ":"))


def children(value: Any, schema: Schema | None) -> list[tuple[str, Any, Schema | None]]:
    """The parts of a container that is merged: (element, part, its schema)."""
    if isinstance(value, dict):
        return [("f:" + key, item, child_schema(schema, key)) for key, item in value.items()]
    assert schema is not None  # a list without schema is atomic
    return [(element_of(item, schema), item, schema.get("items")) for item in value]


def _leaves(value: Any, schema: Schema | None, path: Path, paths: FieldSet) -> None:
    for element, item, below in children(value, schema):
        here = (*path, element)
        if is_atomic(item, below):
            paths.add(here)
            continue
        if not element.startswith("f:"):
            paths.add(here)
        _leaves(item, below, here, paths)


def _values(value: Any, schema: Schema | None, path: Path, paths: dict[Path, Any]) -> None:
    for element, item, below in children(value, schema):
        here = (*path, element)
        if item is None:
            continue
        if is_atomic(item, below) and (item or not _is_granular(item, below)):
            paths[here] = item
        else:
            paths[here] = None
            _values(item, below, here, paths)


def show_path(path: Path) -> str:
    """A path as conflict messages write it: `.spec.containers[name="x"].image`."""
    text = ""
    for element in path:
        kind, _, rest = element.partition(":")
        if kind == "f":
            text += f".{rest}"
        elif kind == "k":
            text += "[" + ",".join(f"{k}={json.dumps(v)}" for k, v in json.loads(rest).items()) + "]"
        else:
            text += f"[={rest}]"
    return text
