"""Objects, their one version counter, and a bounded history that watches and paged lists read.

No queue anywhere: a watcher is a position in the history. One that falls off its end gets 410, so a
client that stops reading costs nothing."""

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pagefleet_localcluster.api.errors import expired, too_large

Json = dict[str, Any]
MAX_OBJECT_BYTES = 3 * 2**19
Collection = tuple[str, str]
"""(group, plural)."""
Name = tuple[str, str]
"""(namespace or empty, name)."""


class Stored:
    """One version of one object, as the JSON text that lists and watches send."""

    __slots__ = ("_obj", "text", "version")

    def __init__(self, obj: Json, text: bytes, version: int) -> None:
        self._obj: Json | None = obj
        self.text = text
        self.version = version

    @property
    def obj(self) -> Json:
        """The object. Nobody changes it; take `copy()`."""
        return self._obj if self._obj is not None else self.copy()

    def copy(self) -> Json:
        """A private copy to work on."""
        return json.loads(self.text)  # type: ignore[no-any-return]

    def shrink(self) -> None:
        """Keeps the text alone: a version of the past is seldom looked into, and objects take five times its room."""
        self._obj = None


@dataclass(frozen=True, eq=False)
class Change:
    """One entry of the history."""

    version: int
    name: Name
    new: Stored | None
    """None: deleted."""
    old: Stored | None
    """None: created."""
    last: Stored
    """What a watch shows: the new object, or the deleted one at the version of its deletion."""


@dataclass
class _Shelf:
    objects: dict[Name, Stored] = field(default_factory=dict)
    history: deque[Change] = field(default_factory=deque)
    history_bytes: int = 0
    oldest: int = 0
    """Highest version that has left the history: watches may start from here on."""
    waiters: set[asyncio.Event] = field(default_factory=set)


Listener = Callable[[Collection, Change], None]


class Store:
    """All objects of the cluster.

    Versions count from `version`; smaller ones are long expired. `history_changes` and
     `history_bytes` bound the history of each collection, whichever ends first."""

    def __init__(self, *, history_changes: int = 2000, history_bytes: int = 16 * 2**20, version: int = 100) -> None:
        self._history_changes = history_changes
        self._history_bytes = history_bytes
        self._shelves: dict[Collection, _Shelf] = {}
        self._listeners: list[Listener] = []
        self.version = version
        self._start = version

    def listen(self, listener: Listener) -> None:
        """Calls `listener` after every change, in the same step."""
        self._listeners.append(listener)

    def _shelf(self, collection: Collection) -> _Shelf:
        return self._shelves.setdefault(collection, _Shelf(oldest=self._start))

    def get(self, collection: Collection, name: Name) -> Stored | None:
        """The current version, if the object exists."""
        return self._shelf(collection).objects.get(name)

    def names(self, collection: Collection) -> list[Name]:
        """Names in list order."""
        return sorted(self._shelf(collection).objects)

    def all(self, collection: Collection, namespace: str = "") -> list[Stored]:
        """Current objects in list order, of one namespace or of all."""
        objects = self._shelf(collection).objects
        return [objects[name] for name in sorted(objects) if not namespace or name[0] == namespace]

    def collections(self) -> list[Collection]:
        """Every collection that ever held an object."""
        return list(self._shelves)

    def put(self, collection: Collection, name: Name, obj: Json) -> Stored:
        """Creates or replaces an object and gives it its resourceVersion. Raises ApiError 413 when it is too large."""
        stored = freeze(obj, self.version + 1)
        if len(stored.text) > MAX_OBJECT_BYTES:
            raise too_large(MAX_OBJECT_BYTES)
        self.version += 1
        shelf = self._shelf(collection)
        old = shelf.objects.get(name)
        shelf.objects[name] = stored
        self._record(collection, shelf, Change(self.version, name, stored, old, stored))
        return stored

    def remove(self, collection: Collection, name: Name, last: Json | None = None) -> Stored:
        """Deletes an object. `last`: its final state when that differs from the stored one. Raises KeyError."""
        shelf = self._shelf(collection)
        old = shelf.objects.pop(name)
        self.version += 1
        final = freeze(last if last is not None else old.copy(), self.version)
        self._record(collection, shelf, Change(self.version, name, None, old, final))
        return final

    def load(self, collection: Collection, name: Name, obj: Json) -> None:
        """Puts back a persisted object with the version that it carries; it makes no history."""
        version = int(obj["metadata"]["resourceVersion"])
        self._shelf(collection).objects[name] = freeze(obj, version)

    def restart_at(self, version: int) -> None:
        """Continues counting from `version`: everything before it has left the history."""
        self.version = self._start = version
        for shelf in self._shelves.values():
            shelf.oldest = version

    def _record(self, collection: Collection, shelf: _Shelf, change: Change) -> None:
        if change.old is not None:
            change.old.shrink()
        if change.new is None:
            change.last.shrink()
        shelf.history.append(change)
        shelf.history_bytes += len(change.last.text)
        while len(shelf.history) > self._history_changes or shelf.history_bytes > self._history_bytes:
            gone = shelf.history.popleft()
            shelf.history_bytes -= len(gone.last.text)
            shelf.oldest = gone.version
        for listener in self._listeners:
            listener(collection, change)
        for waiter in shelf.waiters:
            waiter.set()

    def changes_since(self, collection: Collection, version: int) -> list[Change]:
        """Changes after a version, oldest first. Raises ApiError 410 when the history no longer holds them."""
        shelf = self._shelf(collection)
        if version < shelf.oldest:
            raise expired(f"too old resource version: {version} ({shelf.oldest})")
        found: list[Change] = []
        for change in reversed(shelf.history):
            if change.version <= version:
                break
            found.append(change)
        found.reverse()
        return found

    def at_version(self, collection: Collection, version: int) -> dict[Name, Stored]:
        """The collection as it was at a version. Raises ApiError 410 when the history no longer tells."""
        objects = dict(self._shelf(collection).objects)
        for change in reversed(self.changes_since(collection, version)):
            if change.old is None:
                objects.pop(change.name, None)
            else:
                objects[change.name] = change.old
        return objects

    def waiter(self, collection: Collection) -> "Waiter":
        """A context in which `Waiter.event` is set at every change of the collection."""
        return Waiter(self._shelf(collection).waiters)

    def waiters(self, collection: Collection) -> set[asyncio.Event]:
        """Who waits for changes of a collection."""
        return set(self._shelf(collection).waiters)

    def history_size(self) -> tuple[int, int]:
        """(changes, bytes) that the histories hold."""
        shelves = self._shelves.values()
        return sum(len(s.history) for s in shelves), sum(s.history_bytes for s in shelves)

    def everything(self) -> Iterator[tuple[Collection, Name, Stored]]:
        """Every current object."""
        for collection, shelf in self._shelves.items():
            for name, stored in shelf.objects.items():
                yield collection, name, stored


class Waiter:
    """Registers an event with a collection while the `with` block lasts."""

    def __init__(self, waiters: set[asyncio.Event]) -> None:
        self._waiters = waiters
        self.event = asyncio.Event()

    def __enter__(self) -> "Waiter":
        self._waiters.add(self.event)
        return self

    def __exit__(self, *_: object) -> None:
        self._waiters.discard(self.event)


def freeze(obj: Json, version: int) -> Stored:
    """An object with its version, and its text, which starts with kind and apiVersion."""
    obj = {"kind": obj.get("kind", ""), "apiVersion": obj.get("apiVersion", "")} | obj
    obj["metadata"]["resourceVersion"] = str(version)
    return Stored(obj, json.dumps(obj, separators=(",", ":")).encode(), version)
