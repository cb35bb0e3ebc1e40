"""Keys to reconcile: each at most once at a time, again after a delay or, when it failed, after a growing back-off that
no other wish to look at the key shortens."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pagefleet_localcluster.client import UNREACHABLE, ApiError

logger = logging.getLogger(__name__)

MIN_BACKOFF_SECONDS = 0.02
MAX_BACKOFF_SECONDS = 5.0


class WorkQueue:
    """Runs `reconcile(key)`, which returns the seconds after which to look again, or None."""

    def __init__(self, name: str, reconcile: Callable[[str], Awaitable[float | None]]) -> None:
        self._name = name
        self._reconcile = reconcile
        self._due: dict[str, float] = {}
        self._failures: dict[str, tuple[int, float]] = {}
        """Key -> (failures in a row, when it may be tried again)."""
        self._wake = asyncio.Event()

    def add(self, key: str, after_seconds: float = 0.0) -> None:
        """Reconcile `key` at the latest after `after_seconds`, or when its back-off ends."""
        when = max(asyncio.get_running_loop().time() + after_seconds, self._failures.get(key, (0, 0.0))[1])
        self._due[key] = min(when, self._due.get(key, when))
        self._wake.set()

    async def run(self) -> None:
        """Reconcile what is due until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            ready = [key for key, when in self._due.items() if when <= loop.time()]
            for key in ready:
                del self._due[key]
                await self._attempt(key)
            if ready:
                continue
            delay = min(self._due.values(), default=None)
            try:
                async with asyncio.timeout_at(delay):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _attempt(self, key: str) -> None:
        try:
            again = await self._reconcile(key)
        except Exception as error:  # the boundary: one broken object must not end all controllers
            failures = self._failures.get(key, (0, 0.0))[0] + 1
            delay = min(MIN_BACKOFF_SECONDS * 2 ** min(failures - 1, 16), MAX_BACKOFF_SECONDS)
            self._failures[key] = (failures, asyncio.get_running_loop().time() + delay)
            if not isinstance(error, (ApiError, *UNREACHABLE)):
                logger.exception("%s %s failed", self._name, key)
            elif isinstance(error, ApiError) and error.code in (404, 409):
                logger.debug("%s %s: %s", self._name, key, error)
            else:
                logger.warning("%s %s: %s", self._name, key, error)
            self.add(key)
        else:
            self._failures.pop(key, None)
            if again is not None:
                self.add(key, again)
