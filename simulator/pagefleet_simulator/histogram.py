"""Cumulative latency histograms with the server's own buckets."""

import math
from bisect import bisect_left
from itertools import accumulate

from pagefleet_operator.latency import Histogram


class Observations:
    """Counts by bucket; observe() takes seconds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)

    def observe(self, seconds: float, times: int = 1) -> None:
        """`times` observations of the same value."""
        self._counts[bisect_left(self._bounds, seconds)] += times

    def snapshot(self) -> Histogram:
        """As /metrics shows it."""
        return Histogram(self._bounds, tuple(float(count) for count in accumulate(self._counts)))
