"""The autoscaler's memory as `status.autoscaling` keeps it over a restart of the operator. Pure.

Numbers are rounded so that a resting fleet writes nothing.
"""

import math
from collections.abc import Mapping
from typing import Any

from pagefleet_operator import forecast
from pagefleet_operator.history import Bucket, Change, History
from pagefleet_operator.standing import STEP_SECONDS, Shadow, Standing
from pagefleet_operator.times import parse_timestamp, timestamp

MAX_COUNT = 2**31 - 1
"""Largest number that is kept: the API refuses a larger int32, and with it the whole status."""


def remember(history: History, *, recommended: int) -> dict[str, Any]:
    """`status.autoscaling.history`. `recommended`: what the load asks for now."""
    memory: dict[str, Any] = {
        # Buckets that hold no more than the current recommendation hold nothing back.
        "buckets": [
            {"start": timestamp(bucket.start), "maxWanted": min(bucket.max_wanted, MAX_COUNT)}
            for bucket in history.buckets[-12:]
            if bucket.max_wanted > recommended
        ]
    }
    if history.starts:
        memory["startupSecondsP90"] = min(round(forecast.start_seconds(history.starts)), MAX_COUNT)
    if history.saturation_running is not None:
        memory["saturationRunning"] = min(round(history.saturation_running), MAX_COUNT)
    if history.turnover_seconds is not None:
        memory["turnoverMilliseconds"] = min(max(1, two_digits(1000 * history.turnover_seconds)), MAX_COUNT)
    if history.standing.seen > 0:
        memory["standing"] = _standing(history.standing)
    return memory


def restore_history(status: Mapping[str, Any], *, replicas: int, now: float) -> tuple[History, list[Mapping[str, Any]]]:
    """The autoscaler's memory and its last decisions out of a status; what is damaged in it is left out.

    The time that nobody watched counts as "the replicas were needed", so that a restart never shrinks early.
    """
    autoscaling = _mapping(status.get("autoscaling"))
    history = _mapping(autoscaling.get("history"))
    buckets: list[Bucket] = []
    changes: list[Change] = []
    decisions: list[Mapping[str, Any]] = []
    for item in _mappings(history.get("buckets")):
        start = _seconds(item.get("start"))
        if start is not None and start <= now:
            buckets.append(Bucket(start, _whole(item.get("maxWanted")) or 0))
    for item in _mappings(autoscaling.get("decisions")):
        at = _seconds(item.get("time"))
        if at is not None:
            decisions.append(item)
            changes.append(Change(min(at, now), (_whole(item.get("to")) or 0) - (_whole(item.get("from")) or 0)))
    saturation, start = _whole(history.get("saturationRunning")), _whole(history.get("startupSecondsP90"))
    turnover = _whole(history.get("turnoverMilliseconds"))
    return (
        History(
            buckets=(*sorted(buckets, key=lambda bucket: bucket.start), Bucket(now, replicas)),
            changes=tuple(changes),
            starts=() if start is None else (("before the restart", float(start)),),
            saturation_running=None if saturation is None else float(saturation),
            turnover_seconds=None if turnover is None else max(1, turnover) / 1000,
            standing=_restore_standing(_mapping(history.get("standing"))),
            watched_at=now,
        ),
        decisions,
    )


def _standing(standing: Standing) -> dict[str, Any]:
    """In few digits, so that it seldom changes; counts that were never late are not worth a line."""
    return {
        "replicas": standing.replicas,
        "seenReplicaMinutes": min(max(1, two_digits(standing.seen * STEP_SECONDS / 60)), MAX_COUNT),
        "longestQuietMinutes": min(two_digits(standing.longest_quiet * STEP_SECONDS / 60), MAX_COUNT),
        "late": [
            {"replicas": shadow.replicas, "permille": permille}
            for shadow in standing.shadows
            if (permille := round(1000 * shadow.late / standing.seen))
        ],
    }


def _restore_standing(status: Mapping[str, Any]) -> Standing:
    replicas = max(1, _whole(status.get("replicas")) or 1)
    seen = (_whole(status.get("seenReplicaMinutes")) or 0) * 60 / STEP_SECONDS
    late = {replicas: 0}
    for item in _mappings(status.get("late")):
        count, permille = _whole(item.get("replicas")), _whole(item.get("permille"))
        if count is not None and permille is not None and permille <= 1000:
            late[count] = permille
    shadows = tuple(Shadow(count, late[count] / 1000 * seen) for count in sorted(late))
    quiet = (_whole(status.get("longestQuietMinutes")) or 0) * 60 / STEP_SECONDS
    return Standing(replicas=replicas, seen=seen, shadows=shadows, longest_quiet=quiet)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _whole(value: Any) -> int | None:
    """A number of things; None: none, or one that nobody can have written in earnest."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT else None


def _seconds(text: Any) -> float | None:
    try:
        return parse_timestamp(text)
    except (ValueError, AttributeError, TypeError, OverflowError):
        return None


def two_digits(number: float) -> int:
    """Rounded to two significant digits."""
    return int(round(number, 1 - math.floor(math.log10(number)))) if number >= 1 else 0
