"""What the watches have shown so far: the latest body of every object that matters, by kind and key."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from pagefleet_operator import names
from pagefleet_operator.names import ObjectKey
from pagefleet_operator.resources import CHILDREN

Body = Mapping[str, Any]

LLMDEPLOYMENT = names.KIND
POD = "Pod"
CHILD_KINDS = tuple(CHILDREN)


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
        self._pods_of: dict[ObjectKey, dict[ObjectKey, Body]] = defaultdict(dict)

    def put(self, kind: str, body: Body) -> None:
        """A body of an object; ignored when a newer one of the same object is known (our own writes come first)."""
        if not _is_older(body, self._objects[kind].get(key_of(body))):
            self._put(kind, body)

    def _put(self, kind: str, body: Body) -> None:
        key = key_of(body)
        if kind == POD:
            self._forget_pod(key)
            owner = owner_of(body)
            if owner is not None:
                self._pods_of[owner][key] = body
        self._objects[kind][key] = body

    def drop(self, kind: str, body: Body) -> None:
        """The object is gone; a body of another uid under its name stays."""
        key = key_of(body)
        known = self._objects[kind].get(key)
        if known is not None and known["metadata"].get("uid") == body["metadata"].get("uid"):
            del self._objects[kind][key]
            if kind == POD:
                self._forget_pod(key)

    def replace(self, kind: str, bodies: Iterable[Body], namespace: str | None) -> set[ObjectKey]:
        """All objects of a kind as just listed (in one namespace, or in all). Returns the keys that differ."""
        fresh = {key_of(body): body for body in bodies}
        known = {
            key: body for key, body in self._objects[kind].items() if namespace is None or key.namespace == namespace
        }
        changed = {key for key in {*fresh, *known} if _version(fresh.get(key)) != _version(known.get(key))}
        for key in changed:
            if key in fresh:
                self._put(kind, fresh[key])
            else:
                self.drop(kind, known[key])
        return changed

    def get(self, kind: str, key: ObjectKey) -> Body | None:
        """The latest body, or None."""
        return self._objects[kind].get(key)

    def keys(self, kind: str) -> list[ObjectKey]:
        """All keys of a kind."""
        return list(self._objects[kind])

    def pods_of(self, key: ObjectKey) -> list[Body]:
        """Pods that carry the label of this LLMDeployment."""
        return list(self._pods_of.get(key, {}).values())

    def _forget_pod(self, key: ObjectKey) -> None:
        known = self._objects[POD].get(key)
        owner = owner_of(known) if known is not None else None
        if owner is not None:
            self._pods_of[owner].pop(key, None)
            if not self._pods_of[owner]:
                del self._pods_of[owner]


def _is_older(body: Body, known: Body | None) -> bool:
    if known is None or known["metadata"].get("uid") != body["metadata"].get("uid"):
        return False
    new, old = (str(item["metadata"].get("resourceVersion", "")) for item in (body, known))
    return new.isdigit() and old.isdigit() and int(new) < int(old)


def _version(body: Body | None) -> tuple[Any, Any] | None:
    return None if body is None else (body["metadata"].get("uid"), body["metadata"].get("resourceVersion"))
