"""How long events live."""

from typing import Any

from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.event_expiry import EVENTS, expire_events
from pagefleet_localcluster.objects import format_time

HOUR = 3600.0


def test_events_go_an_hour_after_they_were_last_seen() -> None:
    now = [10 * HOUR]
    cluster = Cluster(lambda: now[0])
    seen: dict[str, dict[str, Any]] = {
        "new": {},
        "repeated": {"lastTimestamp": format_time(now[0] + HOUR)},
        "series": {"series": {"lastObservedTime": format_time(now[0] + HOUR)}},
        "unset": {"lastTimestamp": None, "eventTime": None},
    }
    for name, times in seen.items():
        meta = {"name": name, "namespace": "d", "creationTimestamp": format_time(now[0])}
        cluster.store.put(EVENTS, ("d", name), {"kind": "Event", "apiVersion": "v1", "metadata": meta} | times)
    assert expire_events(cluster) == 0
    now[0] += HOUR + 1
    assert expire_events(cluster) == 2
    assert [name for _, name in cluster.store.names(EVENTS)] == ["repeated", "series"]
