"""Where demand will be when a replica that is ordered now is ready. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

WINDOW_SECONDS = 30.0
"""Demand of so long ago still shapes the trend."""
MIN_POINTS = 5
MIN_SPAN_SECONDS = 6.0
MAX_GROWTH = 2.0
"""A trend never more than doubles the demand of now."""

PRIOR_START_SECONDS = 110.0
"""Start-up time of a replica before one was measured."""
MAX_STARTS = 20


@dataclass(frozen=True, slots=True)
class Point:
    """Demand in blocks at one time."""

    time: float
    demand: float


def project(points: Sequence[Point], now: float, horizon_seconds: float) -> float:
    """Demand at now + horizon, at least the last one and at most MAX_GROWTH times it.

    The slope is the smaller one of the whole window's and of its later half's, and never negative: noise is no trend,
    and a rise that has ended is none either. `points` are oldest first; the last one is now's.
    """
    last = points[-1].demand
    recent = [point for point in points if point.time > now - WINDOW_SECONDS]
    if len(recent) < MIN_POINTS or recent[-1].time - recent[0].time < MIN_SPAN_SECONDS:
        return last
    slope = max(0.0, min(_slope(recent), _slope(recent[len(recent) // 2 :])))
    return min(last + slope * horizon_seconds, last * MAX_GROWTH)


def _slope(points: Sequence[Point]) -> float:
    """Least squares, blocks per second."""
    mean_time = sum(point.time for point in points) / len(points)
    mean_demand = sum(point.demand for point in points) / len(points)
    spread = sum((point.time - mean_time) ** 2 for point in points)
    if spread == 0:
        return 0.0
    return sum((point.time - mean_time) * (point.demand - mean_demand) for point in points) / spread


def start_seconds(starts: Sequence[tuple[str, float]]) -> float:
    """The 90th percentile of measured start-up times, or the prior."""
    if not starts:
        return PRIOR_START_SECONDS
    ordered = sorted(seconds for _, seconds in starts)
    return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
