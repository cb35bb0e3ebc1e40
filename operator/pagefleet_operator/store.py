"""What the watches have shown so far: the latest body of every object that matters, by kind and key."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from pagefleet_operator import names
from pagefleet_operator.names import ObjectKey

Body = Mapping[str, Any]

MAX_TOMBSTONES = 4096

LLMDEPLOYMENT = names.KIND
POD = "Pod"
REPLICA_SET = "ReplicaSet"
OWNED_KINDS = (POD, REPLICA_SET)
"""Kinds of which one LLMDeployment has many; they are found by their label."""


def key_of(body: Body) -> ObjectKey:
    """Namespace and name of an object."""
    return ObjectKey(body["metadata"]["namespace"], body["metadata"]["name"])


def owner_of(body: Body) -> ObjectKey | None:
    """The LLMDeployment that a child's label names."""
    name = (body["metadata"].get("labels") or {}).get(names.LABEL_OWNER)
    return ObjectKey(body["metadata"]["namespace"], name) if name else None


class Store:
    """Latest bodies. Objects come from watches and, at each resync, from lists."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[ObjectKey, Body]] = defaultdict(dict)
        self._owned: dict[tuple[str, ObjectKey], dict[ObjectKey, Body]] = defaultdict(dict)
        self._deleted: OrderedDict[tuple[str, ObjectKey], str] = OrderedDict()
        """Versions of the last deletions, so that an older list does not bring them back."""
        self.has_pod_monitors = False
        """Whether the cluster has that kind; of the cluster, so `clear` keeps it."""
        self.highest = 0
        """Highest resourceVersion seen: a list that is asked for later cannot be older, unless the API went back."""

    def put(self, kind: str, body: Body) -> bool:
        """A body of an object; ignored when a newer one of the same object is known (our own writes come first), or
        its deletion: the reply to a write may come after the watch has told the object's end.

        Whether it is news: the echo of a write of ours is none.
        """
        key = key_of(body)
        known = self._objects[kind].get(key)
        if _is_older(body, known) or self._is_buried(kind, key, body):
            return False
        self._put(kind, body)
        return known is None or not _is_same(body, known)

    def _is_buried(self, kind: str, key: ObjectKey, body: Body) -> bool:
        grave = self._deleted.get((kind, key))
        version = _resource_version(body)
        return grave is not None and grave.isdigit() and version.isdigit() and int(version) <= int(grave)

    def clear(self) -> None:
        """Forget everything: the API server was set back to an earlier state."""
        self._objects.clear()
        self._owned.clear()
        self._deleted.clear()
        self.highest = 0

    def _put(self, kind: str, body: Body) -> None:
        key = key_of(body)
        self._saw(body)
        if kind in OWNED_KINDS:
            self._disown(kind, key)
            owner = owner_of(body)
            if owner is not None:
                self._owned[kind, owner][key] = body
        self._objects[kind][key] = body

    def drop(self, kind: str, body: Body) -> None:
        """The object is gone; a body of another uid under its name stays."""
        key = key_of(body)
        self._saw(body)
        self._deleted[kind, key] = _resource_version(body)
        self._deleted.move_to_end((kind, key))
        while len(self._deleted) > MAX_TOMBSTONES:
            self._deleted.popitem(last=False)
        known = self._objects[kind].get(key)
        if known is not None and known["metadata"].get("uid") == body["metadata"].get("uid"):
            if kind in OWNED_KINDS:
                self._disown(kind, key)
            del self._objects[kind][key]

    def behind(self, kind: str, bodies: Iterable[Body], namespace: str | None, version: str) -> set[ObjectKey]:
        """Keys that this store shows in an older state than a list of a namespace (None: of all) at `version`.

        What the store knows of after `version`, deletions included, is none of them: then our watch is ahead.
        """
        fresh = {key_of(body): body for body in bodies}
        known = {
            key: body for key, body in self._objects[kind].items() if namespace is None or key.namespace == namespace
        }
        different = {key for key in {*fresh, *known} if _version(fresh.get(key)) != _version(known.get(key))}
        return {key for key in different if not self._is_ahead(kind, key, fresh.get(key), version)}

    def _is_ahead(self, kind: str, key: ObjectKey, listed: Body | None, version: str) -> bool:
        known = self._objects[kind].get(key)
        if known is None:
            return _is_later(self._deleted.get((kind, key), ""), version)
        if listed is None:
            return _is_later(_resource_version(known), version)
        return _is_later(_resource_version(known), _resource_version(listed))

    def replace(self, kind: str, bodies: Iterable[Body], namespace: str | None, version: str) -> None:
        """Make this store show what was listed at `version`, apart from what it knows of later."""
        fresh = {key_of(body): body for body in bodies}
        for key in self.behind(kind, fresh.values(), namespace, version):
            if key in fresh:
                self._put(kind, fresh[key])
            else:
                self.drop(kind, self._objects[kind][key])

    def get(self, kind: str, key: ObjectKey) -> Body | None:
        """The latest body, or None."""
        return self._objects[kind].get(key)

    def bodies(self, kind: str) -> list[Body]:
        """Latest bodies of all objects of a kind."""
        return list(self._objects[kind].values())

    def keys(self, kind: str) -> list[ObjectKey]:
        """All keys of a kind."""
        return list(self._objects[kind])

    def _saw(self, body: Body) -> None:
        version = _resource_version(body)
        if version.isdigit():
            self.highest = max(self.highest, int(version))

    def owned(self, kind: str, key: ObjectKey) -> list[Body]:
        """Objects of one of OWNED_KINDS that carry the label of this LLMDeployment."""
        return list(self._owned.get((kind, key), {}).values())

    def _disown(self, kind: str, key: ObjectKey) -> None:
        known = self._objects[kind].get(key)
        owner = owner_of(known) if known is not None else None
        if owner is not None:
            self._owned[kind, owner].pop(key, None)
            if not self._owned[kind, owner]:
                del self._owned[kind, owner]


def _is_older(body: Body, known: Body | None) -> bool:
    if known is None or known["metadata"].get("uid") != body["metadata"].get("uid"):
        return False
    return _is_later(_resource_version(known), _resource_version(body))


def _is_same(body: Body, known: Body) -> bool:
    return _resource_version(body) != "" and _version(body) == _version(known)


def _is_later(version: str, than: str) -> bool:
    """Versions of one collection compare as integers."""
    return version.isdigit() and than.isdigit() and int(version) > int(than)


def _resource_version(body: Body) -> str:
    return str(body["metadata"].get("resourceVersion", ""))


def _version(body: Body | None) -> tuple[Any, Any] | None:
    return None if body is None else (body["metadata"].get("uid"), body["metadata"].get("resourceVersion"))
