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


def remember(history: History, *, recommended: int) -> dict[str, Any]:
    """`status.autoscaling.history`. `recommended`: what the load asks for now."""
    memory: dict[str, Any] = {
        # Buckets that hold no more than the current recommendation hold nothing back.
        "buckets": [
            {"start": timestamp(bucket.start), "maxWanted": bucket.max_wanted}
            for bucket in history.buckets[-12:]
            if bucket.max_wanted > recommended
        ]
    }
    if history.starts:
        memory["startupSecondsP90"] = round(forecast.start_seconds(history.starts))
    if history.saturation_running is not None:
        memory["saturationRunning"] = round(history.saturation_running)
    if history.turnover_seconds is not None:
        memory["turnoverMilliseconds"] = max(1, two_digits(1000 * history.turnover_seconds))
    if history.standing.seen > 0:
        memory["standing"] = _standing(history.standing)
    return memory


def restore_history(status: Mapping[str, Any], *, replicas: int, now: float) -> tuple[History, list[Mapping[str, Any]]]:
    """The autoscaler's memory and its last decisions out of a status; what is damaged in it is left out.

    The time that nobody watched counts as "the replicas were needed", so that a restart never shrinks early.
    """
    autoscaling = status.get("autoscaling") or {}
    history = autoscaling.get("history") or {}
    buckets: list[Bucket] = []
    changes: list[Change] = []
    decisions: list[Mapping[str, Any]] = []
    for item in history.get("buckets") or []:
        start = _seconds(item.get("start"))
        if start is not None and start <= now:
            buckets.append(Bucket(start, int(item.get("maxWanted", 0))))
    for item in autoscaling.get("decisions") or []:
        at = _seconds(item.get("time"))
        if at is not None:
            decisions.append(item)
            changes.append(Change(min(at, now), int(item.get("to", 0)) - int(item.get("from", 0))))
    saturation, start = history.get("saturationRunning"), history.get("startupSecondsP90")
    turnover = history.get("turnoverMilliseconds")
    return (
        History(
            buckets=(*sorted(buckets, key=lambda bucket: bucket.start), Bucket(now, replicas)),
            changes=tuple(changes),
            starts=() if start is None else (("before the restart", float(start)),),
            saturation_running=None if saturation is None else float(saturation),
            turnover_seconds=None if turnover is None else max(1, turnover) / 1000,
            standing=_restore_standing(history.get("standing") or {}),
        ),
        decisions,
    )


def _standing(standing: Standing) -> dict[str, Any]:
    """In few digits, so that it seldom changes; counts that were never late are not worth a line."""
    return {
        "replicas": standing.replicas,
        "seenReplicaMinutes": max(1, two_digits(standing.seen * STEP_SECONDS / 60)),
        "longestQuietMinutes": two_digits(standing.longest_quiet * STEP_SECONDS / 60),
        "late": [
            {"replicas": shadow.replicas, "permille": permille}
            for shadow in standing.shadows
            if (permille := round(1000 * shadow.late / standing.seen))
        ],
    }


def _restore_standing(status: Mapping[str, Any]) -> Standing:
    replicas = max(1, int(status.get("replicas", 1)))
    seen = max(0, int(status.get("seenReplicaMinutes", 0))) * 60 / STEP_SECONDS
    late = {replicas: 0} | {
        int(item.get("replicas", 0)): int(item.get("permille", 0)) for item in status.get("late", ())
    }
    shadows = [
        Shadow(count, late[count] / 1000 * seen) for count in sorted(late) if count >= 0 and 0 <= late[count] <= 1000
    ]
    quiet = max(0, int(status.get("longestQuietMinutes", 0))) * 60 / STEP_SECONDS
    return Standing(replicas=replicas, seen=seen, shadows=tuple(shadows), longest_quiet=quiet)


def _seconds(text: Any) -> float | None:
    try:
        return parse_timestamp(text)
    except (ValueError, AttributeError, TypeError):
        return None


def two_digits(number: float) -> int:
    """Rounded to two significant digits."""
    return int(round(number, 1 - math.floor(math.log10(number)))) if number >= 1 else 0
