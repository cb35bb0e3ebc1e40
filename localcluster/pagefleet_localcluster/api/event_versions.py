"""Events live in two groups: stored as core/v1, shown as events.k8s.io/v1 with other field names."""

from typing import Any

Json = dict[str, Any]
_NAMES = {
    "regarding": "involvedObject",
    "note": "message",
    "reportingController": "reportingComponent",
    "deprecatedSource": "source",
    "deprecatedFirstTimestamp": "firstTimestamp",
    "deprecatedLastTimestamp": "lastTimestamp",
    "deprecatedCount": "count",
}
_BACK = {core: name for name, core in _NAMES.items()}


def to_core(event: Json) -> Json:
    """An events.k8s.io/v1 event as core/v1."""
    return {_NAMES.get(key, key): value for key, value in event.items()} | {"apiVersion": "v1"}


def to_events_group(event: Json) -> Json:
    """A core/v1 event as events.k8s.io/v1."""
    return {_BACK.get(key, key): value for key, value in event.items()} | {"apiVersion": "events.k8s.io/v1"}
