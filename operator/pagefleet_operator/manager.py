"""All loops: starts one per LLMDeployment, wakes them, and keeps a crashed one from being the last word."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from itertools import chain, repeat
from typing import Any

from pagefleet_operator import names
from pagefleet_operator.errors import ApiError
from pagefleet_operator.names import ObjectKey
from pagefleet_operator.observe import Listing, list_everything, targets
from pagefleet_operator.reconcile import Context, ObjectLoop
from pagefleet_operator.resources import POD_MONITORS
from pagefleet_operator.store import LLMDEPLOYMENT, key_of, owner_of

logger = logging.getLogger(__name__)

MANAGED_BY_SELECTOR = f"{names.LABEL_MANAGED_BY}={names.FIELD_MANAGER}"
"""What the watches and lists of children are filtered by."""


LIST_AGAIN_SECONDS = 2.0
WATCH_GRACE_SECONDS = 2.0
"""What a list shows must come through the watch within this time."""
MAX_BAD_RESYNCS = 2
MAX_WAIT_SECONDS = 120.0
"""A change that waits longer to be looked at makes the process unhealthy; back-offs are far shorter."""


class Manager:
    """Use as: `start()` once, `watched(...)` for every event, `stop()` at the end."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._loops: dict[ObjectKey, ObjectLoop] = {}
        self._tasks: dict[ObjectKey, asyncio.Task[None]] = {}
        self._background: list[asyncio.Task[None]] = []
        self._turns = asyncio.Semaphore(context.settings.reconcile.concurrency)
        self._started = False
        self._stopping = False
        self._bad_resyncs = 0
        self.failed_event = asyncio.Event()
        """Set when a background task died: the process must end, its supervisor starts it anew."""

    def watched(self, kind: str, event_type: str | None, body: Mapping[str, Any]) -> None:
        """An event of a watch: remember the body and mark its LLMDeployment dirty."""
        store = self._context.store
        if event_type == "DELETED":
            store.drop(kind, body)
        elif not store.put(kind, body):
            return
        self._context.telemetry.objects.set(len(store.keys(LLMDEPLOYMENT)))
        owner = key_of(body) if kind == LLMDEPLOYMENT else owner_of(body) or key_of(body)
        self.mark(owner)

    def mark(self, key: ObjectKey) -> None:
        """The object needs a look; starts its loop if it has none."""
        if self._stopping or not self._started:
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

    async def start(self) -> None:
        """List everything once, so that nothing is judged half seen; then start loops, scraper and resync."""
        context = self._context
        while True:
            try:
                context.store.has_pod_monitors = await self._has_pod_monitors()
                for listing in await self._list():
                    listing.put(context.store)
                break
            except ApiError as error:
                logger.warning("first list: %s; again in %.0f s", error, LIST_AGAIN_SECONDS)
            await asyncio.sleep(LIST_AGAIN_SECONDS)
        self._started = True
        self._background = [
            asyncio.create_task(context.scraper.run(lambda: targets(context.store), self.mark_all), name="scraper"),
            asyncio.create_task(self._resync_forever(), name="resync"),
            asyncio.create_task(self._look_for_kinds(), name="kinds"),
        ]
        for task in self._background:
            task.add_done_callback(self._background_ended)
        self.mark_all()

    async def stop(self) -> None:
        """End everything."""
        self._stopping = True
        tasks = [*self._background, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start_loop(self, key: ObjectKey) -> None:
        self._loops[key] = ObjectLoop(key, self._context, self._turns)
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
        """Heals what a watch lost, and notices when one is dead: then `watch_problem` says so."""
        settings = self._context.settings
        for pause in chain(settings.reconcile.first_resyncs_seconds, repeat(settings.reconcile.resync_seconds)):
            await asyncio.sleep(pause)
            try:
                listings = await self._list()
            except ApiError as error:
                logger.warning("resync: %s", error)
                continue
            await self.resync(listings)

    async def _look_for_kinds(self) -> None:
        """PodMonitors may come and go with their CRD."""
        context = self._context
        while True:
            await asyncio.sleep(context.settings.reconcile.kinds_seconds)
            with contextlib.suppress(ApiError):
                has_them = await self._has_pod_monitors()
                if has_them != context.store.has_pod_monitors:
                    logger.info("the cluster has %s PodMonitors", "now" if has_them else "no longer")
                    context.store.has_pod_monitors = has_them
                    self.mark_all()

    async def _has_pod_monitors(self) -> bool:
        """Whether the cluster has the kind and we may use it: an older Role does not say so. Raises ApiError."""
        context = self._context
        if not await context.api.is_served(POD_MONITORS):
            return False
        if context.store.has_pod_monitors:
            return True
        try:
            for namespace in context.settings.namespaces or (None,):
                await context.api.list(POD_MONITORS, namespace, labels=MANAGED_BY_SELECTOR)
        except ApiError as error:
            if error.status != 403:
                raise
            logger.warning("no PodMonitors are made: %s", error)
            return False
        return True

    async def _list(self) -> list[Listing]:
        store = self._context.store
        seen = store.highest
        listings = [
            await list_everything(
                self._context.api, namespace, MANAGED_BY_SELECTOR, pod_monitors=store.has_pod_monitors
            )
            for namespace in self._context.settings.namespaces or (None,)
        ]
        if any(listing.is_before(seen) for listing in listings):
            logger.warning("the API server was set back to an earlier state: everything is taken anew")
            store.clear()
        return listings

    async def resync(self, listings: list[Listing]) -> None:
        """Compare with fresh lists, give the watches a moment to bring what is on its way, then take the lists."""
        store = self._context.store
        if any(listing.behind(store) for listing in listings):
            await asyncio.sleep(WATCH_GRACE_SECONDS)
        missed = sum(listing.behind(store) for listing in listings)
        for listing in listings:
            listing.put(store)
        self._context.telemetry.missed_events.inc(missed)
        self._bad_resyncs = self._bad_resyncs + 1 if missed else 0
        if missed:
            logger.warning("resync: the watches had missed %d changes", missed)
        self.mark_all()

    @property
    def num_loops(self) -> int:
        """LLMDeployments that are looked after."""
        return len(self._loops)

    def watch_problem(self) -> str | None:
        """Health check: a watch that missed changes in several resyncs running is dead, whatever it says."""
        if self._bad_resyncs < MAX_BAD_RESYNCS:
            return None
        return f"the watches missed changes in {self._bad_resyncs} resyncs running"

    def reconcile_problem(self) -> str | None:
        """Health check: a change must not wait for ever."""
        now = self._context.clock()
        waits = [now - loop.dirty_since for loop in self._loops.values() if loop.dirty_since is not None]
        longest = max(waits, default=0.0)
        return f"a change has waited {longest:.0f} s" if longest > MAX_WAIT_SECONDS else None
