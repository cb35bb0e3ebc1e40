"""The garbage collector and the namespace controller: what follows from deletions.

Runs inside the API process, driven by the store's changes: one queue of names, worked off in order."""

import asyncio
import logging
from collections import deque
from typing import Any

from pagefleet_localcluster.api import writes
from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.deletion import FOREGROUND, ORPHAN, DeleteOptions, delete
from pagefleet_localcluster.api.errors import ApiError
from pagefleet_localcluster.api.metadata import may_go
from pagefleet_localcluster.api.resources import Resource
from pagefleet_localcluster.api.store import Change, Collection, Name

Json = dict[str, Any]
Key = tuple[Collection, Name]
NAMESPACES: Collection = ("", "namespaces")
_STEPS_PER_TURN = 50
_RETRY_SECONDS = 5.0
_LOG = logging.getLogger(__name__)


class Collector:
    """Deletes dependents of deleted owners, keeps foreground and orphan promises, empties namespaces."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._dependents: dict[str, set[Key]] = {}
        self._uids: dict[str, Key] = {}
        self._queue: deque[Key] = deque()
        self._queued: set[Key] = set()
        self._wake = asyncio.Event()
        for collection, name, stored in cluster.store.everything():
            self._index(collection, name, stored.obj)
            self._enqueue((collection, name))
        cluster.store.listen(self._on_change)

    def _index(self, collection: Collection, name: Name, obj: Json) -> None:
        self._uids[obj["metadata"]["uid"]] = (collection, name)
        for owner in obj["metadata"].get("ownerReferences") or ():
            self._dependents.setdefault(owner["uid"], set()).add((collection, name))

    def _on_change(self, collection: Collection, change: Change) -> None:
        key = (collection, change.name)
        if change.old is not None:
            for owner in change.old.obj["metadata"].get("ownerReferences") or ():
                held = self._dependents.get(owner["uid"], set())
                held.discard(key)
                if not held:
                    self._dependents.pop(owner["uid"], None)
                if change.new is None and owner["uid"] in self._uids:
                    self._enqueue(self._uids[owner["uid"]])
        if change.new is not None:
            self._index(collection, change.name, change.new.obj)
            meta = change.new.obj["metadata"]
            if meta.get("deletionTimestamp") or (change.old is None and meta.get("ownerReferences")):
                self._enqueue(key)
            return
        uid = change.last.obj["metadata"]["uid"]
        self._uids.pop(uid, None)
        for dependent in sorted(self._dependents.get(uid, ())):
            self._enqueue(dependent)
        if change.name[0]:
            self._enqueue((NAMESPACES, ("", change.name[0])))

    def _enqueue(self, key: Key) -> None:
        if key not in self._queued:
            self._queued.add(key)
            self._queue.append(key)
            self._wake.set()

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            await self._wake.wait()
            self.work(_STEPS_PER_TURN)
            if not self._queue:
                self._wake.clear()
            await asyncio.sleep(0)

    def work(self, steps: int) -> int:
        """Handles at most `steps` names; returns how many are left."""
        while self._queue and steps > 0:
            key = self._queue.popleft()
            self._queued.discard(key)
            try:
                self._handle(key)
            except ApiError as error:
                _LOG.warning("%s %s: %s; trying again in %s s", *key, error.message[:300], _RETRY_SECONDS)
                asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._enqueue, key)
            steps -= 1
        return len(self._queue)

    def _handle(self, key: Key) -> None:
        collection, name = key
        resource = self._cluster.registry.by_collection(collection)
        stored = self._cluster.store.get(collection, name)
        if resource is None or stored is None:
            return
        meta = stored.obj["metadata"]
        if meta.get("deletionTimestamp"):
            self._handle_deleting(resource, name, meta)
        elif meta.get("ownerReferences"):
            self._handle_owned(resource, name, meta["ownerReferences"])

    def _handle_owned(self, resource: Resource, name: Name, owners: list[Json]) -> None:
        """An object all of whose owners are gone goes too; a gone owner beside a living one is struck off."""
        alive = [owner for owner in owners if self._is_alive(owner, name[0])]
        if len(alive) == len(owners):
            return
        if alive:
            self._set_metadata(resource, name, {"ownerReferences": alive})
        else:
            self._delete(resource, name, "Background")

    def _is_alive(self, owner: Json, namespace: str) -> bool:
        found = self._uids.get(owner["uid"])
        return found is not None and found[1][0] in ("", namespace)

    def _handle_deleting(self, resource: Resource, name: Name, meta: Json) -> None:
        finalizers = meta.get("finalizers") or []
        dependents = sorted(self._dependents.get(meta["uid"], ()))
        if ORPHAN in finalizers:
            for dependent in dependents:
                self._disown(dependent, meta["uid"])
            self._drop_finalizer(resource, name, ORPHAN)
        elif FOREGROUND in finalizers:
            blocking = False
            for dependent in dependents:
                blocking |= self._delete_dependent(*dependent, meta["uid"])
            if not blocking:
                self._drop_finalizer(resource, name, FOREGROUND)
        if resource.collection == NAMESPACES:
            self._empty_namespace(resource, name)

    def _delete_dependent(self, collection: Collection, name: Name, owner_uid: str) -> bool:
        """Deletes one dependent of a foreground deletion; whether the owner has to wait for it."""
        resource = self._cluster.registry.by_collection(collection)
        stored = self._cluster.store.get(collection, name)
        if resource is None or stored is None:
            return False
        owners = stored.obj["metadata"].get("ownerReferences") or []
        others = [owner for owner in owners if owner["uid"] != owner_uid and self._is_alive(owner, name[0])]
        if others:
            self._disown((collection, name), owner_uid)
            return False
        if "deletionTimestamp" not in stored.obj["metadata"]:
            self._delete(resource, name, "Foreground" if stored.obj["metadata"]["uid"] in self._dependents else "")
        blocks = any(owner["uid"] == owner_uid and owner.get("blockOwnerDeletion") for owner in owners)
        return blocks and self._cluster.store.get(collection, name) is not None

    def _disown(self, key: Key, uid: str) -> None:
        resource = self._cluster.registry.by_collection(key[0])
        stored = self._cluster.store.get(*key)
        if resource is None or stored is None:
            return
        owners = [owner for owner in stored.obj["metadata"].get("ownerReferences") or [] if owner["uid"] != uid]
        self._set_metadata(resource, key[1], {"ownerReferences": owners})

    def _drop_finalizer(self, resource: Resource, name: Name, finalizer: str) -> None:
        stored = self._cluster.get(resource, name)
        if stored is not None:
            held = [item for item in stored.obj["metadata"].get("finalizers") or [] if item != finalizer]
            self._set_metadata(resource, name, {"finalizers": held})

    def _set_metadata(self, resource: Resource, name: Name, change: Json) -> None:
        options = writes.WriteOptions(manager="kube-controller-manager", field_validation="Ignore")
        try:
            writes.patch(self._cluster, resource, name, lambda obj: _with_metadata(obj, change), options)
        except ApiError as error:
            if error.code != 404:
                raise

    def _delete(self, resource: Resource, name: Name, propagation: str) -> None:
        try:
            delete(self._cluster, resource, name, DeleteOptions(propagation=propagation or "Background"))
        except ApiError as error:
            if error.code != 404:
                raise

    def _empty_namespace(self, resource: Resource, name: Name) -> None:
        """Deletes what the namespace holds; the namespace itself when nothing is left."""
        left = False
        for collection in self._cluster.store.collections():
            kind = self._cluster.registry.by_collection(collection)
            if kind is None or not kind.namespaced:
                continue
            for stored in self._cluster.store.all(collection, name[1]):
                inner = (name[1], stored.obj["metadata"]["name"])
                if "deletionTimestamp" not in stored.obj["metadata"]:
                    self._delete(kind, inner, "Background")
                left |= self._cluster.store.get(collection, inner) is not None
        stored_namespace = self._cluster.get(resource, name)
        if left or stored_namespace is None:
            return
        obj = stored_namespace.copy()
        obj.get("spec", {}).pop("finalizers", None)
        if may_go(resource, obj):
            self._cluster.store.remove(resource.collection, name, obj)


def _with_metadata(obj: Json, change: Json) -> Json:
    kept = {key: value for key, value in obj["metadata"].items() if key not in change}
    return obj | {"metadata": kept | {key: value for key, value in change.items() if value}}
