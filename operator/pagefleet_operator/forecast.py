"""What demand is, and where it will be when a replica that is ordered now is ready. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SMOOTHING_SECONDS = 16.0
"""Demand is the mean of so long: the largest of many noisy values would keep replicas that no load needs."""

TREND_SECONDS = 240.0
"""A trend must have lasted so long: the minute or so in which a step fills replicas and queues looks like one, too."""
MIN_POINTS = 2
"""Points that each quarter of a trend needs."""
MAX_GROWTH = 2.0
"""A trend never more than doubles the demand of now."""

PRIOR_START_SECONDS = 110.0
"""Start-up time of a replica before one was measured."""
MAX_STARTS = 20


@dataclass(frozen=True, slots=True)
class Point:
    """Demand at one time."""

    time: float
    demand: float
    """Blocks."""
    requests: float = 0.0
    """Running, and waiting as far as they count."""


def smooth(points: Sequence[Point], now: float) -> Point:
    """The mean of the last SMOOTHING_SECONDS. `points` are oldest first; the last one is now's and always counts."""
    recent = [point for point in points[:-1] if now - SMOOTHING_SECONDS < point.time <= now] + [points[-1]]
    return Point(
        now,
        sum(point.demand for point in recent) / len(recent),
        sum(point.requests for point in recent) / len(recent),
    )


def project(points: Sequence[Point], level: float, now: float, horizon_seconds: float) -> float:
    """Demand at now + horizon: at least `level`, at most MAX_GROWTH times it.

    The slope is the smallest of the rises between the quarters of TREND_SECONDS, and never negative: noise is no trend;
    a step is none, since some neighbouring quarters lie on the same side of it; nor is a rise that has ended.
    """
    length = TREND_SECONDS / 4
    quarters = [_mean(points, now - part * length, now - (part - 1) * length) for part in (4, 3, 2, 1)]
    means = [mean for mean in quarters if mean is not None]
    if len(means) < len(quarters):
        return level
    slope = max(0.0, min(after - before for before, after in pairwise(means))) / length
    return min(level + slope * horizon_seconds, level * MAX_GROWTH)


def _mean(points: Sequence[Point], start: float, end: float) -> float | None:
    inside = [point.demand for point in points if start < point.time <= end]
    return sum(inside) / len(inside) if len(inside) >= MIN_POINTS else None


def start_seconds(starts: Sequence[tuple[str, float]]) -> float:
    """The 90th percentile of measured start-up times, or the prior."""
    if not starts:
        return PRIOR_START_SECONDS
    ordered = sorted(seconds for _, seconds in starts)
    return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
