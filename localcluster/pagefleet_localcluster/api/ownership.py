"""Who owns which field: managedFields on every write, and server-side apply.

Pure: takes objects, returns objects and manager entries. Algorithm: structured-merge-diff v4."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagefleet_localcluster.api.errors import ApiError
from pagefleet_localcluster.api.field_sets import (
    FieldSet,
    Path,
    all_fields,
    applied_fields,
    children,
    element_of,
    from_fields_v1,
    is_atomic,
    show_path,
    to_fields_v1,
)
from pagefleet_localcluster.api.schema import Schema, child_schema

Json = dict[str, Any]
Key = tuple[str, str, str]
"""(manager, operation, subresource): what makes an entry of managedFields its own."""


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Who writes, and where."""

    manager: str
    """`fieldManager`, or the first part of the client's user agent."""
    operation: str
    """`Apply` or `Update`."""
    subresource: str
    """Empty for the object itself."""
    api_version: str
    """Group and version of the request."""
    now: str
    """Time of the write, RFC 3339."""
    reset: frozenset[str]
    """Top-level fields that this endpoint does not write (`status`, or `spec` and `metadata`)."""
    structs: frozenset[Path] = frozenset()
    """Containers that always exist in the typed object and so are never owned themselves."""


@dataclass
class _Entry:
    fields: FieldSet
    api_version: str
    time: str


def _read(obj: Mapping[str, Any]) -> dict[Key, _Entry]:
    entries = {}
    for entry in obj.get("metadata", {}).get("managedFields") or ():
        key = (entry["manager"], entry["operation"], entry.get("subresource", ""))
        entries[key] = _Entry(from_fields_v1(entry.get("fieldsV1") or {}), entry["apiVersion"], entry.get("time", ""))
    return entries


def _write(entries: Mapping[Key, _Entry]) -> list[Json]:
    found = []
    order = sorted(entries.items(), key=lambda pair: (pair[0][1] != "Apply", pair[1].time, pair[0][0], pair[0][2]))
    for (manager, operation, subresource), entry in order:
        if not entry.fields:
            continue
        item: Json = {"manager": manager, "operation": operation, "apiVersion": entry.api_version}
        item |= {"time": entry.time, "fieldsType": "FieldsV1", "fieldsV1": to_fields_v1(entry.fields)}
        found.append(item | ({"subresource": subresource} if subresource else {}))
    return found


@dataclass(frozen=True)
class _Change:
    written: FieldSet
    """Added or modified."""
    removed: FieldSet


def _compare(old: Json, new: Json, schema: Schema, writer: Writer) -> _Change:
    before, after = (
        all_fields({key: value for key, value in obj.items() if key not in writer.reset}, schema) for obj in (old, new)
    )
    written = {path for path, value in after.items() if path not in before or before[path] != value}
    removed = before.keys() - after.keys()
    return _Change({path for path in written if after[path] or path not in writer.structs}, set(removed))


def track_update(old: Json | None, new: Json, schema: Schema, writer: Writer) -> None:
    """Sets `new`'s managedFields after a create, update or patch: the writer owns what it changed."""
    if new["metadata"].get("managedFields") == [{}]:
        del new["metadata"]["managedFields"]  # how a client clears all ownership on purpose
        return
    entries = _read(old) if old is not None else {}
    if old is not None and not entries:
        new["metadata"].pop("managedFields", None)  # what nobody has ever owned is not tracked until it is applied
        return
    change = _compare(old or {}, new, schema, writer)
    key = (writer.manager, writer.operation, writer.subresource)
    if change.written or change.removed:
        for other, entry in entries.items():
            entry.fields -= change.removed if other == key else change.removed | change.written
        mine = entries.setdefault(key, _Entry(set(), writer.api_version, writer.now))
        if change.written - mine.fields or change.removed:
            mine.time = writer.now
        mine.fields |= change.written
        mine.api_version = writer.api_version
    _set_entries(new, entries)


def _set_entries(obj: Json, entries: Mapping[Key, _Entry]) -> None:
    written = _write(entries)
    if written:
        obj["metadata"]["managedFields"] = written
    else:
        obj["metadata"].pop("managedFields", None)


def apply(live: Json | None, config: Json, schema: Schema, writer: Writer, *, force: bool) -> Json:
    """Server-side apply: `config` merged into `live`, what its manager no longer applies removed.

    Returns the merged object with its managedFields. Raises ApiError 409 when another manager owns a
    field that would change, unless `force`."""
    base: Json = live if live is not None else {"metadata": {}}
    entries = _read(base)
    if live is not None and not entries:
        owned_before = _compare({}, live, schema, replace(writer, reset=frozenset())).written
        entries["before-first-apply", "Update", ""] = _Entry(owned_before, writer.api_version, writer.now)
    key = (writer.manager, "Apply", writer.subresource)
    last = entries[key].fields if key in entries else set()
    reset = {"f:" + field for field in writer.reset}
    mine = {path for path in applied_fields(config, schema) if path[0] not in reset}
    kept = {name: item for name, item in config.items() if name not in writer.reset}
    merged: Json = merge(base, kept, schema)
    others: FieldSet = set().union(*(entry.fields for other, entry in entries.items() if other != key))
    gone = last - mine - others
    if gone:
        merged = _without(merged, schema, (), gone, mine | others)
    change = _compare(base, merged, schema, writer)
    _check_conflicts(entries, key, change.written, force=force)
    for other, entry in entries.items():
        if other != key:
            entry.fields -= change.removed | (change.written if force else set())
    old = entries.get(key)
    time = old.time if old is not None and old.fields == mine and not change.written else writer.now
    entries[key] = _Entry(mine, writer.api_version, time)
    merged.setdefault("metadata", {})
    merged["metadata"] = dict(merged["metadata"])
    _set_entries(merged, entries)
    return merged


def _check_conflicts(entries: Mapping[Key, _Entry], key: Key, written: FieldSet, *, force: bool) -> None:
    if force:
        return
    causes = []
    for (manager, operation, subresource), entry in sorted(entries.items()):
        if (manager, operation, subresource) == key:
            continue
        for path in sorted(entry.fields & written, key=_members_first):
            who = f'"{manager}"'
            if subresource:
                who += f' with subresource "{subresource}"'
            if operation != "Apply":
                who += f" using {entry.api_version}"
            causes.append(
                {"reason": "FieldManagerConflict", "message": f"conflict with {who}", "field": show_path(path)}
            )
    if causes:
        raise ApiError(409, "Conflict", _conflict_text(causes), details={"causes": causes})


def _members_first(path: Path) -> list[tuple[bool, str]]:
    """The order of a set of paths: at each level what ends there comes before what goes on below."""
    return [(depth < len(path) - 1, element) for depth, element in enumerate(path)]


def _conflict_text(causes: list[dict[str, str]]) -> str:
    if len(causes) == 1:
        return f"Apply failed with 1 conflict: {causes[0]['message']}: {causes[0]['field']}"
    groups: dict[str, list[str]] = {}
    for cause in causes:
        groups.setdefault(cause["message"].replace("conflict", "conflicts", 1), []).append(cause["field"])
    lines = [line for who, fields in groups.items() for line in (f"{who}:", *(f"- {field}" for field in fields))]
    return f"Apply failed with {len(causes)} conflicts: " + "\n".join(lines)


def merge(live: Any, config: Any, schema: Schema | None) -> Any:
    """`config` over `live`: granular maps by field, keyed lists by key, sets by value, the rest replaced."""
    if isinstance(config, dict):
        if not isinstance(live, dict) or (schema or {}).get("x-kubernetes-map-type") == "atomic":
            live = {}
        merged = dict(live)
        for name, item in config.items():
            merged[name] = merge(live.get(name), item, child_schema(schema, name))
        return merged
    if isinstance(config, list) and schema and schema.get("x-kubernetes-list-type") in ("map", "set"):
        items = schema.get("items")
        found = {element_of(item, schema): item for item in live} if isinstance(live, list) else {}
        wanted = {element_of(item, schema): item for item in config}
        for element, item in wanted.items():
            found[element] = merge(found.get(element), item, items)
        return _in_order(list(found.items()), list(wanted))
    return copy.deepcopy(config)


def _in_order(found: list[tuple[str, Any]], wanted: list[str]) -> list[Any]:
    """Items in the applied order, those of others staying where they stood."""
    place = {element: index for index, element in enumerate(wanted)}
    queue = sorted((element for element, _ in found if element in place), key=place.__getitem__)
    by_element = dict(found)
    return [by_element[queue.pop(0)] if element in place else item for element, item in found]


def _without(value: Any, schema: Schema | None, path: Path, gone: FieldSet, kept: FieldSet) -> Any:
    """The value without the paths in `gone`; a container that empties goes too unless someone owns it."""
    if is_atomic(value, schema):
        return value
    result: list[tuple[str, Any]] = []
    for element, item, below in children(value, schema):
        here = (*path, element)
        if here in gone and not any(other[: len(here)] == here for other in kept):
            continue
        pruned = item if is_atomic(item, below) else _without(item, below, here, gone, kept)
        if pruned in ({}, []) and pruned != item and here not in kept:
            continue
        result.append((element, pruned))
    if isinstance(value, dict):
        return {element[2:]: item for element, item in result}
    return [item for _, item in result]


def same_but_managers(one: Json, other: Json) -> bool:
    """Whether two objects differ at most in managedFields' times and in resourceVersion."""
    if {**one, "metadata": None} != {**other, "metadata": None}:
        return False
    return _bare(one["metadata"]) == _bare(other["metadata"])


def _bare(meta: Json) -> Json:
    managers = [{**entry, "time": ""} for entry in meta.get("managedFields") or ()]
    return {**meta, "resourceVersion": "", "managedFields": managers}
