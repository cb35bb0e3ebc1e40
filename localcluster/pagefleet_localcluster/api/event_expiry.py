"""Events are kept for an hour, as a real API server keeps them."""

import asyncio

from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.objects import parse_time

EVENTS = ("", "events")
_TTL_SECONDS = 3600.0
_PERIOD_SECONDS = 60.0


def expire_events(cluster: Cluster) -> int:
    """Removes events that nothing has repeated for an hour; returns how many."""
    limit = cluster.clock() - _TTL_SECONDS
    old = [name for name in cluster.store.names(EVENTS) if _last_seen(cluster, name) < limit]
    for name in old:
        cluster.store.remove(EVENTS, name)
    return len(old)


def _last_seen(cluster: Cluster, name: tuple[str, str]) -> float:
    stored = cluster.store.get(EVENTS, name)
    assert stored is not None
    event = stored.obj
    times = [event["metadata"]["creationTimestamp"], event.get("lastTimestamp"), event.get("eventTime")]
    times.append((event.get("series") or {}).get("lastObservedTime"))
    return max(parse_time(text) for text in times if text)


async def run_expiry(cluster: Cluster) -> None:
    """Looks once a minute, until cancelled."""
    while True:
        await asyncio.sleep(_PERIOD_SECONDS)
        expire_events(cluster)
