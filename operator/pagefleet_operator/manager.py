"""All loops: starts one per LLMDeployment, wakes them, and keeps a crashed one from being the last word."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from pagefleet_operator import names
from pagefleet_operator.errors import ApiError
from pagefleet_operator.names import ObjectKey
from pagefleet_operator.observe import resync, targets
from pagefleet_operator.reconcile import Context, ObjectLoop
from pagefleet_operator.store import LLMDEPLOYMENT, key_of, owner_of

logger = logging.getLogger(__name__)

MANAGED_BY_SELECTOR = f"{names.LABEL_MANAGED_BY}={names.FIELD_MANAGER}"
"""What the watches and lists of children are filtered by."""


class Manager:
    """Use as: `start()` once, `watched(...)` for every event, `stop()` at the end."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._loops: dict[ObjectKey, ObjectLoop] = {}
        self._tasks: dict[ObjectKey, asyncio.Task[None]] = {}
        self._background: list[asyncio.Task[None]] = []
        self._stopping = False
        self.failed_event = asyncio.Event()
        """Set when a background task died: the process must end, its supervisor starts it anew."""

    def watched(self, kind: str, event_type: str | None, body: Mapping[str, Any]) -> None:
        """An event of a watch: remember the body and mark its LLMDeployment dirty."""
        store = self._context.store
        if event_type == "DELETED":
            store.drop(kind, body)
        else:
            store.put(kind, body)
        owner = key_of(body) if kind == LLMDEPLOYMENT else owner_of(body) or key_of(body)
        self.mark(owner)

    def mark(self, key: ObjectKey) -> None:
        """The object needs a look; starts its loop if it has none."""
        if self._stopping:
            return
        if key not in self._loops:
            if self._context.store.get(LLMDEPLOYMENT, key) is None:
                return
            self._start_loop(key)
        self._loops[key].mark()

    def mark_all(self) -> None:
        """Every object needs a look."""
        for key in {*self._loops, *self._context.store.keys(LLMDEPLOYMENT)}:
            self.mark(key)

    def start(self) -> None:
        """Start the scraper and the periodic resync."""
        context = self._context
        self._background = [
            asyncio.create_task(context.scraper.run(lambda: targets(context.store), self.mark_all), name="scraper"),
            asyncio.create_task(self._resync_forever(), name="resync"),
        ]
        for task in self._background:
            task.add_done_callback(self._background_ended)

    async def stop(self) -> None:
        """End everything."""
        self._stopping = True
        tasks = [*self._background, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start_loop(self, key: ObjectKey) -> None:
        self._loops[key] = ObjectLoop(key, self._context)
        task = asyncio.create_task(self._loops[key].run(), name=f"reconcile {key}")
        self._tasks[key] = task
        task.add_done_callback(lambda ended: self._loop_ended(key, ended))

    def _loop_ended(self, key: ObjectKey, task: asyncio.Task[None]) -> None:
        self._loops.pop(key, None)
        self._tasks.pop(key, None)
        if task.cancelled() or self._stopping:
            return
        error = task.exception()
        if error is None:
            self.mark(key)  # created again meanwhile
            return
        pause = self._context.settings.reconcile.max_backoff_seconds
        logger.error("%s: reconcile failed unexpectedly; again in %.0f s", key, pause, exc_info=error)
        asyncio.get_running_loop().call_later(pause, self.mark, key)

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._stopping:
            return
        logger.critical("%s ended: the operator cannot go on", task.get_name(), exc_info=task.exception())
        self.failed_event.set()

    async def _resync_forever(self) -> None:
        settings = self._context.settings
        while True:
            await asyncio.sleep(settings.reconcile.resync_seconds)
            for namespace in settings.namespaces or (None,):
                try:
                    await resync(self._context.api, self._context.store, namespace, MANAGED_BY_SELECTOR)
                except ApiError as error:
                    logger.warning("resync of %s: %s", namespace or "all namespaces", error)
            self.mark_all()
