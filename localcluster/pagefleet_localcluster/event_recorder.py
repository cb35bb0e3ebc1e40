"""Kubernetes events: repeats are counted on one object, posting never blocks the caller, floods are dropped."""

import asyncio
import contextlib
import logging
import platform
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pagefleet_localcluster.client import EVENTS, UNREACHABLE, ApiError, Client
from pagefleet_localcluster.objects import Object, format_micro_time, format_time, name_of

logger = logging.getLogger(__name__)

MAX_PENDING_EVENTS = 1000
MAX_KNOWN_EVENTS = 4096
BURST_PER_OBJECT = 25
"""As Kubernetes' spam filter: events about one object from one source, before it is rate limited ..."""
REFILL_SECONDS = 300.0
"""... to one every five minutes."""


@dataclass
class _Bucket:
    tokens: float
    refilled_at: float


class EventRecorder:
    """Writes events of one component. `run()` must be running for them to be sent."""

    def __init__(
        self, client: Client, component: str, *, host: str | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._client = client
        self._source = {"component": component, **({"host": host} if host else {})}
        self._clock = clock
        self._pending: asyncio.Queue[tuple[str, Object]] = asyncio.Queue(MAX_PENDING_EVENTS)
        self._known: OrderedDict[tuple[str, ...], tuple[str, int]] = OrderedDict()
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def record(
        self,
        obj: Object,
        api_version: str,
        kind: str,
        *,
        type: str,
        reason: str,
        message: str,
        field: str = "",
        action: str = "",
    ) -> None:
        """Note that `reason` happened to `obj` (`field`: the part of it, such as a container).

        With an `action` the event has the form of events.k8s.io, as the scheduler's have."""
        now = self._clock()
        metadata = obj["metadata"]
        if not self._take_token(metadata["uid"], now):
            return
        component, host = self._source["component"], self._source.get("host", "")
        event: Object = {
            "metadata": {
                "name": f"{name_of(obj)}.{time.time_ns():x}",
                "namespace": metadata.get("namespace") or "default",
            },
            "involvedObject": {
                "apiVersion": api_version,
                "kind": kind,
                "name": name_of(obj),
                "uid": metadata["uid"],
                "resourceVersion": metadata.get("resourceVersion", ""),
                **({"namespace": metadata["namespace"]} if metadata.get("namespace") else {}),
                **({"fieldPath": field} if field else {}),
            },
            "type": type,
            "reason": reason,
            "message": message[:1024],
            "reportingComponent": component,
        }
        if action:
            event |= {
                "action": action,
                "eventTime": format_micro_time(now),
                "source": {},
                "reportingInstance": f"{component}-{platform.node()}",
            }
        else:
            moment = format_time(now)
            event |= {"source": self._source, "reportingInstance": host, "count": 1}
            event |= {"firstTimestamp": moment, "lastTimestamp": moment}
        with contextlib.suppress(asyncio.QueueFull):
            self._pending.put_nowait((metadata["uid"], event))

    async def run(self) -> None:
        """Send what was recorded, until cancelled."""
        while True:
            uid, event = await self._pending.get()
            try:
                await self._send(uid, event)
            except ApiError as error:  # the object's namespace may be gone: an event is never worth a retry
                logger.debug("event %s refused: %s", event["reason"], error)
            except UNREACHABLE as error:
                logger.debug("event %s lost: %s", event["reason"], error)

    async def _send(self, uid: str, event: Object) -> None:
        namespace = event["metadata"]["namespace"]
        same = (uid, event["involvedObject"].get("fieldPath", ""), event["type"], event["reason"], event["message"])
        known = self._known.pop(same, None)
        if known is not None:
            name, count = known[0], known[1] + 1
            body: Object = {"count": count, "lastTimestamp": event.get("lastTimestamp")}
            if "action" in event:
                body = {"series": {"count": count, "lastObservedTime": event["eventTime"]}}
            try:
                await self._client.patch(EVENTS, name, body, namespace)
                self._known[same] = (name, count)
                return
            except ApiError as error:
                if error.code != 404:
                    raise
        await self._client.create(EVENTS, event, namespace)
        self._known[same] = (event["metadata"]["name"], 1)
        if len(self._known) > MAX_KNOWN_EVENTS:
            self._known.popitem(last=False)

    def _take_token(self, uid: str, now: float) -> bool:
        bucket = self._buckets.setdefault(uid, _Bucket(BURST_PER_OBJECT, now))
        bucket.tokens = min(BURST_PER_OBJECT, bucket.tokens + (now - bucket.refilled_at) / REFILL_SECONDS)
        bucket.refilled_at = now
        if len(self._buckets) > MAX_KNOWN_EVENTS:
            self._buckets.popitem(last=False)
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True
