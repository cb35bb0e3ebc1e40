"""Patches: JSON patch, merge patch and strategic merge patch. Pure: each returns a new object."""

import copy
import types
from typing import Any

import jsonpatch

from pagefleet_localcluster.api.errors import ApiError, bad_request, patch_rejected
from pagefleet_localcluster.api.schema import Schema, child_schema

MAX_JSON_PATCH_OPERATIONS = 10_000


class _Replace(jsonpatch.ReplaceOperation):
    """As Kubernetes replaces: a member that an object does not have is added."""

    def apply(self, obj: Any) -> Any:
        parent, member = self.pointer.to_last(obj)
        if not isinstance(parent, dict) or member is None:
            return super().apply(obj)
        parent[member] = self.operation["value"]
        return obj


class _JsonPatch(jsonpatch.JsonPatch):
    operations = types.MappingProxyType({**jsonpatch.JsonPatch.operations, "replace": _Replace})


def json_patch(obj: Any, operations: Any) -> Any:
    """RFC 6902. Raises ApiError 422 (a test fails, a path is missing), 400 (no patch), 413 (too many operations)."""
    if not isinstance(operations, list):
        raise bad_request("error decoding patch: json: cannot unmarshal object into Go value of type jsonpatch.Patch")
    if len(operations) > MAX_JSON_PATCH_OPERATIONS:
        most = MAX_JSON_PATCH_OPERATIONS
        text = f"The allowed maximum operations in a JSON patch is {most}, got {len(operations)}"
        raise ApiError(413, "RequestEntityTooLarge", text)
    try:
        return _JsonPatch(operations).apply(obj)
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException, KeyError, TypeError, IndexError) as error:
        raise patch_rejected() from error


def merge_patch(value: Any, patch: Any) -> Any:
    """RFC 7386: null removes, objects merge, everything else replaces."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(value) if isinstance(value, dict) else {}
    for key, item in patch.items():
        if item is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), item)
    return result


def strategic_patch(value: Any, patch: Any, schema: Schema | None) -> Any:
    """Kubernetes' own: like a merge patch, but lists with a merge key merge item by item.

    Honours `$patch: delete|replace|merge`, `$deleteFromPrimitiveList`, `$setElementOrder` and `$retainKeys`."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    directive = patch.get("$patch")
    if directive == "replace":
        return {key: copy.deepcopy(item) for key, item in patch.items() if key != "$patch"}
    if directive == "delete":
        return {}
    if directive not in (None, "merge"):
        raise bad_request(f"Unrecognized patch type: {directive}")
    result = dict(value) if isinstance(value, dict) else {}
    retain = patch.get("$retainKeys")
    if retain is not None:
        result = {key: item for key, item in result.items() if key in retain}
    for key, item in patch.items():
        if key in ("$patch", "$retainKeys") or key.startswith("$setElementOrder/"):
            continue
        if key.startswith("$deleteFromPrimitiveList/"):
            field = key.partition("/")[2]
            result[field] = [kept for kept in result.get(field) or [] if kept not in item]
        elif item is None:
            result.pop(key, None)
        elif isinstance(item, list):
            order = patch.get(f"$setElementOrder/{key}")
            result[key] = _merge_list(result.get(key), item, child_schema(schema, key), order)
        else:
            result[key] = strategic_patch(result.get(key), item, child_schema(schema, key))
    for key, order in patch.items():
        field = key.removeprefix("$setElementOrder/")
        if field != key and field not in patch and isinstance(result.get(field), list):
            result[field] = _ordered(result[field], order, merge_key(child_schema(schema, field)))
    return result


def merge_key(schema: Schema | None) -> str | None:
    """The field by which strategic merge matches the items of a list; None when the list is replaced."""
    if not schema or schema.get("x-kubernetes-list-type") != "map":
        return None
    return str(schema["x-kubernetes-list-map-keys"][0])


def _merge_list(value: Any, patch: list[Any], schema: Schema | None, order: Any) -> list[Any]:
    old = value if isinstance(value, list) else []
    if schema and schema.get("x-kubernetes-list-type") == "set":
        return _ordered([*old, *(item for item in patch if item not in old)], order, None)
    key = merge_key(schema)
    if key is None:
        return copy.deepcopy(patch)
    if any(isinstance(item, dict) and item.get("$patch") == "replace" and len(item) == 1 for item in patch):
        return [copy.deepcopy(item) for item in patch if "$patch" not in item]
    result = list(old)
    for item in patch:
        if not isinstance(item, dict) or key not in item:
            raise bad_request(f"map: {item} does not contain declared merge key: {key}")
        at = next((i for i, kept in enumerate(result) if kept.get(key) == item[key]), None)
        if item.get("$patch") == "delete":
            result = [kept for kept in result if kept.get(key) != item[key]]
        elif at is None:
            result.append(strategic_patch({}, item, schema and schema.get("items")))
        else:
            result[at] = strategic_patch(result[at], item, schema and schema.get("items"))
    return _ordered(result, order, key) if isinstance(order, list) else _patched_first(result, old, patch, key)


def _patched_first(items: list[Any], old: list[Any], patch: list[Any], key: str) -> list[Any]:
    """The order without `$setElementOrder`: an item of the patch, in the patch's order, stands before one that only the
    server has unless both were there and stood the other way round."""
    # By text: a key may be of any type here; its own check comes later.
    place = {str(item.get(key)): index for index, item in enumerate(old)}
    found = {str(item.get(key)): item for item in items}
    patched = [found[str(item[key])] for item in patch if str(item[key]) in found]
    others = [item for item in items if all(item is not one for one in patched)]
    result = []
    while patched and others:
        there = place.get(str(patched[0].get(key)))
        first = others if there is not None and place[str(others[0].get(key))] < there else patched
        result.append(first.pop(0))
    return [*result, *patched, *others]


def _ordered(items: list[Any], order: Any, key: str | None) -> list[Any]:
    if not isinstance(order, list):
        return items
    wanted = [item.get(key) if key else item for item in order]
    place = {str(name): index for index, name in enumerate(wanted)}
    names = [str(item.get(key) if key else item) for item in items]
    listed = sorted((i for i, name in enumerate(names) if name in place), key=lambda i: place[names[i]])
    rest = [i for i, name in enumerate(names) if name not in place]
    return [items[i] for i in [*listed, *rest]]
