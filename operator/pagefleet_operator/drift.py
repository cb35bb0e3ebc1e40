"""Whether a child is as we last applied it. Pure.

A live object holds more than we sent (defaults, fields of others) and may hold it in another spelling (quantities), so
it is compared with what the API answered to our own apply, and only in the fields that we sent.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagefleet_operator import names
from pagefleet_operator.builders import Manifest

Child = Mapping[str, Any]
ATOMIC_FIELDS = frozenset({"selector", "podSelector"})
"""Fields that the API replaces as a whole: a key that someone adds to a Service's selector is an edit of ours."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What we last applied of one child."""

    manifest: Manifest
    uid: str
    ours: Any
    """Our fields as the API answered them."""


def applied(manifest: Manifest, answer: Child) -> Applied:
    """Remember an apply and its answer."""
    return Applied(manifest, answer["metadata"]["uid"], _ours(answer, manifest))


def digest(manifest: Manifest) -> str:
    """Fingerprint of a manifest."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def needs_apply(manifest: Manifest, live: Child | None, before: Applied | None) -> bool:
    """Whether the child must be applied: it is new, wanted otherwise, or was edited."""
    if live is None or before is None or before.manifest != manifest:
        return True
    return before.uid != live.get("metadata", {}).get("uid") or was_edited(live, before)


def was_edited(live: Child, before: Applied) -> bool:
    """Whether someone changed a field of ours since we applied it."""
    same_object = before.uid == live.get("metadata", {}).get("uid")
    return same_object and bool(_ours(live, before.manifest) != before.ours)


def _ours(live: Child, manifest: Manifest) -> Any:
    """Our fields of a live object. Its type cannot be edited, and items of a list do not even say it."""
    return project(live, {name: value for name, value in manifest.items() if name not in ("apiVersion", "kind")})


def project(live: Any, manifest: Any) -> Any:
    """The part of `live` that `manifest` speaks of; lists of named objects are matched by name."""
    if isinstance(manifest, Mapping):
        if not isinstance(live, Mapping):
            return live
        return {
            key: live.get(key) if key in ATOMIC_FIELDS else project(live.get(key), value)
            for key, value in manifest.items()
        }
    if not isinstance(manifest, list) or not isinstance(live, list):
        return live
    if manifest and all(isinstance(item, Mapping) and "name" in item for item in manifest):
        named = {item.get("name"): item for item in live if isinstance(item, Mapping)}
        return [project(named.get(item["name"]), item) for item in manifest]
    return live


def managers_of(child: Child) -> list[str]:
    """Names of others who hold fields of the child's spec, the latest writer first: for messages."""
    entries = child.get("metadata", {}).get("managedFields") or []
    others = [
        entry
        for entry in entries
        if entry.get("manager") != names.FIELD_MANAGER
        and entry.get("subresource") != "status"
        and "f:spec" in (entry.get("fieldsV1") or {})
    ]
    latest_first = sorted(others, key=lambda entry: str(entry.get("time", "")), reverse=True)
    return list(dict.fromkeys(str(entry.get("manager")) for entry in latest_first))
