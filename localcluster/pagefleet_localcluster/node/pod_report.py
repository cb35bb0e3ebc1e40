"""Tells the API server how a pod is, and confirms its end."""

import asyncio
import logging
import time
from collections.abc import Callable

from pagefleet_localcluster.client import PODS, UNREACHABLE, ApiError, Client
from pagefleet_localcluster.node.pod_status import PodView, pod_status
from pagefleet_localcluster.objects import Object, name_of, version_of

logger = logging.getLogger(__name__)

MAX_BACKOFF_SECONDS = 5.0
MAX_TRIES = 5


class PodReport:
    """Writes the status whenever it is `due`; `pod` is the newest version of the object that anyone here has seen."""

    def __init__(
        self, pod: Object, client: Client, view: Callable[[], PodView], taken: Callable[[Object], None]
    ) -> None:
        """`view()` is how the pod is now; `taken(pod)` is called for every newer version."""
        self.pod = pod
        self.due = asyncio.Event()
        self._client = client
        self._view = view
        self._taken = taken

    def take(self, pod: Object) -> None:
        """Go on from a newer version; an older one (an answer overtaken by the watch) is ignored."""
        if version_of(pod) > version_of(self.pod):
            pod["metadata"].pop("managedFields", None)
            self.pod = pod
            self._taken(pod)

    async def run(self) -> None:
        """Write what is due until cancelled."""
        backoff = 0.05
        while True:
            await self.due.wait()
            self.due.clear()
            try:
                await self._write()
                backoff = 0.05
            except (ApiError, *UNREACHABLE) as error:
                if isinstance(error, ApiError) and error.code == 404:
                    continue
                logger.debug("status of pod %s: %s", name_of(self.pod), error)
                self.due.set()
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    async def delete(self) -> None:
        """Write the final status and confirm the end to the API server, until it takes it or the pod is gone."""
        metadata = self.pod["metadata"]
        backoff = 0.05
        while True:
            try:
                await self._write()
                await self._client.delete(
                    PODS, metadata["name"], metadata["namespace"], uid=metadata["uid"], grace_seconds=0
                )
                return
            except ApiError as error:
                if error.code in (404, 409):
                    return
                logger.warning("deleting pod %s: %s", metadata["name"], error)
            except UNREACHABLE as error:
                logger.debug("deleting pod %s: %s", metadata["name"], error)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    async def _write(self) -> None:
        for _ in range(MAX_TRIES):
            status = pod_status(self.pod, self._view(), time.time())
            if status == self.pod.get("status"):
                return
            try:
                self.take(await self._client.replace(PODS, {**self.pod, "status": status}, "status"))
                return
            except ApiError as error:
                if error.code != 409:
                    raise
            fresh = await self._client.get(PODS, name_of(self.pod), self.pod["metadata"]["namespace"])
            if fresh["metadata"]["uid"] != self.pod["metadata"]["uid"]:
                return
            self.take(fresh)
