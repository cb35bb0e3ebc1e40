"""A local copy of one collection, kept equal to the API server's: list, then watch, resume, list again on 410."""

import asyncio
import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from pagefleet_localcluster.client import UNREACHABLE, ApiError, Client, Resource
from pagefleet_localcluster.objects import Object, key_of, version_of

logger = logging.getLogger(__name__)

MIN_BACKOFF_SECONDS = 0.05
MAX_BACKOFF_SECONDS = 5.0

Listener = Callable[[Object | None, Object | None], None]
"""Called with (old, new) after each change; old is None for a new object, new for a deleted one."""


@dataclass
class Reflector:
    """`objects` holds the collection by key (`namespace/name`), without managedFields.

    `record` shows a writer its own writes before the watch does, by comparing resource versions."""

    client: Client
    resource: Resource
    query: dict[str, str] = field(default_factory=dict)
    """`fieldSelector`, `labelSelector`."""
    objects: dict[str, Object] = field(default_factory=dict)
    listeners: list[Listener] = field(default_factory=list)
    synced: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after the first list."""
    _version: int = 0

    def record(self, obj: Object) -> None:
        """Show an object as a write returned it, unless the watch is already past that version."""
        known = self.objects.get(key_of(obj))
        if obj.get("kind") == "Status" or version_of(obj) <= max(self._version, version_of(known) if known else 0):
            return
        self._set(obj)

    async def run(self) -> None:
        """Follow the collection until cancelled; back off (with jitter, bounded) while the server fails."""
        backoff = MIN_BACKOFF_SECONDS
        listed = False
        while True:
            try:
                if not listed:
                    await self._list()
                    listed = True
                await self._watch()
                backoff = MIN_BACKOFF_SECONDS
                continue
            except ApiError as error:
                listed = listed and error.code not in (404, 410, 504)
                log = logger.debug if error.code == 410 else logger.warning
                log("%s: %s", self.resource.plural, error)
            except (*UNREACHABLE, json.JSONDecodeError) as error:
                logger.debug("%s: %s", self.resource.plural, error)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, MAX_BACKOFF_SECONDS)

    async def _list(self) -> None:
        answer = await self.client.list(self.resource, **self.query)
        self._version = int(answer["metadata"]["resourceVersion"])
        fresh = {key_of(item): item for item in answer["items"]}
        for key in [key for key, obj in self.objects.items() if key not in fresh and version_of(obj) <= self._version]:
            self._remove(key)
        for item in fresh.values():
            self._set(item)
        self.synced.set()

    async def _watch(self) -> None:
        version, timeout = str(self._version), random.randint(240, 360)
        watch = self.client.watch(self.resource, resource_version=version, timeout_seconds=timeout, **self.query)
        async for kind, obj in watch:
            self._version = max(self._version, version_of(obj))
            if kind == "DELETED":
                known = self.objects.get(key_of(obj))
                if known is not None and version_of(known) <= version_of(obj):
                    self._remove(key_of(obj))
            elif kind != "BOOKMARK":
                self._set(obj)

    def _set(self, obj: Object) -> None:
        obj["metadata"].pop("managedFields", None)
        key = key_of(obj)
        old = self.objects.get(key)
        if old is not None:
            if version_of(old) >= version_of(obj):
                return
            if old["metadata"]["uid"] != obj["metadata"]["uid"]:
                self._remove(key)
                old = None
        self.objects[key] = obj
        for listener in self.listeners:
            listener(old, obj)

    def _remove(self, key: str) -> None:
        if (old := self.objects.pop(key, None)) is not None:
            for listener in self.listeners:
                listener(old, None)
