"""Latencies of the last window, from the differences of cumulative histograms. Pure: time is passed in."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

WINDOW_SECONDS = 60.0
"""Latencies older than this do not count."""

SPACING_SECONDS = 5.0
"""Snapshots are kept this far apart: the window is that much longer at most."""
MAX_SNAPSHOTS = 16
"""Per pod; the window fills twelve of them."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts at ascending upper bounds in seconds; the last bound is infinity."""

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()

    @property
    def total(self) -> float:
        """Observations."""
        return self.counts[-1] if self.counts else 0.0

    def since(self, earlier: "Histogram") -> "Histogram":
        """What was observed after `earlier`; a histogram that was reset in between counts whole."""
        if self.bounds != earlier.bounds or any(
            new < old for new, old in zip(self.counts, earlier.counts, strict=True)
        ):
            return self
        return Histogram(self.bounds, tuple(new - old for new, old in zip(self.counts, earlier.counts, strict=True)))

    def plus(self, other: "Histogram") -> "Histogram":
        """Both together; histograms with other bounds than ours are left out."""
        if not self.counts:
            return other
        if self.bounds != other.bounds:
            return self
        return Histogram(self.bounds, tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    def quantile(self, part: float) -> float | None:
        """Seconds below which `part` (0..1) of the observations are, interpolated; None without any.

        Beyond the last finite bound nothing is known: that bound is returned, as Prometheus does.
        """
        if self.total <= 0:
            return None
        rank = part * self.total
        lower_bound = lower_count = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= rank and count > lower_count:
                if bound == float("inf"):
                    return lower_bound
                return lower_bound + (bound - lower_bound) * (rank - lower_count) / (count - lower_count)
            lower_bound, lower_count = (bound if bound != float("inf") else lower_bound), count
        return lower_bound

    def share_within(self, seconds: float) -> float | None:
        """Part of the observations at most `seconds` long, interpolated; None without any."""
        if self.total <= 0:
            return None
        lower_bound = lower_count = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if seconds < bound:
                if bound == float("inf"):
                    return lower_count / self.total
                inside = lower_count + (count - lower_count) * (seconds - lower_bound) / (bound - lower_bound)
                return inside / self.total
            lower_bound, lower_count = bound, count
        return 1.0


@dataclass(frozen=True, slots=True)
class Latencies:
    """Cumulative histograms of one pod, or what they say about a window."""

    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token: Histogram = field(default_factory=Histogram)

    def since(self, earlier: "Latencies") -> "Latencies":
        """What was observed after `earlier`."""
        return Latencies(
            self.time_to_first_token.since(earlier.time_to_first_token), self.inter_token.since(earlier.inter_token)
        )

    def plus(self, other: "Latencies") -> "Latencies":
        """Both together."""
        return Latencies(
            self.time_to_first_token.plus(other.time_to_first_token), self.inter_token.plus(other.inter_token)
        )


class LatencyWindow:
    """Snapshots of each pod's histograms over the window."""

    def __init__(self) -> None:
        self._snapshots: dict[str, deque[tuple[float, Latencies]]] = {}

    def observe(self, pods: Mapping[str, tuple[float, Latencies]], now: float) -> Latencies:
        """Add the latest (time, histograms) of every pod; returns what all pods observed in the window.

        A pod's first snapshot is its start: what it observed before we knew it has no known time and does not count.
        """
        observed = Latencies()
        for name, (time, latencies) in pods.items():
            kept = self._snapshots.setdefault(name, deque(maxlen=MAX_SNAPSHOTS))
            if kept and time < kept[-1][0]:
                kept.clear()  # the clock went back: nothing older can be told apart
            if not kept or time - kept[-1][0] >= SPACING_SECONDS:
                kept.append((time, latencies))
            while len(kept) > 1 and kept[1][0] <= now - WINDOW_SECONDS:
                kept.popleft()
            observed = observed.plus(latencies.since(kept[0][1]))
        self._snapshots = {name: kept for name, kept in self._snapshots.items() if name in pods}
        return observed
