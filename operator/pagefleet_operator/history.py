"""What the autoscaler remembers: past recommendations and past changes. A frozen value; every change returns a new one.

Recommendations are kept in at most 12 buckets over the longer stabilisation window, the form in which they survive a
restart in `status.autoscaling.history`. Times are seconds on the operator's clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pagefleet_operator.forecast import MAX_STARTS, TREND_SECONDS, Point
from pagefleet_operator.standing import Standing

MAX_BUCKETS = 12
MAX_CHANGES = 256
"""Changes remembered for the policies' periods, at most."""

TURNOVER_WEIGHT = 0.05
"""Weight of one round's turnover: a memory of some forty seconds at the default period."""

UNWATCHED_SECONDS = 10.0
"""After so long without a judged load, or a step of the clock, what was needed is not known: five scrape periods."""

KNEE_WEIGHT = 0.2
"""Weight of a new observation of the running requests at saturation."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The extremes of the recommendations of one part of the window: [start, start + bucket length)."""

    start: float
    max_wanted: int
    min_wanted: int | None = None
    """None: not known; status keeps only the maximum."""
    max_needed: int | None = None
    """Without what must stand ready; None: not known to be less than `max_wanted`."""

    @property
    def most_needed(self) -> int:
        """`max_needed`, or what it is at most."""
        return self.max_wanted if self.max_needed is None else self.max_needed


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the wanted replicas."""

    time: float
    change: int


@dataclass(frozen=True, slots=True)
class History:
    """The autoscaler's memory of one LLMDeployment."""

    buckets: tuple[Bucket, ...] = ()
    """Oldest first."""
    changes: tuple[Change, ...] = ()
    """Oldest first."""
    demand: tuple[Point, ...] = ()
    """Demand of the last rounds, oldest first."""
    starts: tuple[tuple[str, float], ...] = ()
    """(pod, seconds) of the last measured start-ups."""
    unsettled_at: float | None = None
    """When replicas were last starting: until a window later latencies still tell of the smaller fleet."""
    saturation_running: float | None = None
    """Requests that one replica runs while its queue is not empty; None until a queue was seen."""
    turnover_seconds: float | None = None
    """How long a request runs, learnt while nothing waits, or once every replica was full for a minute."""
    standing: Standing = field(default_factory=Standing)
    """What load has done, as far as it says how many replicas must stand ready."""
    watched_at: float | None = None
    """When the load was last judged."""

    def resumed(self, replicas: int, *, now: float) -> "History":
        """After a time that nobody watched, all of the `replicas` count as needed until now: without metrics for longer
        than the window, or after a clock's step, a fleet would else shrink at once."""
        if self.watched_at is None or abs(now - self.watched_at) < UNWATCHED_SECONDS:
            return self
        return replace(self, buckets=(*self.buckets, Bucket(now, replicas))[-MAX_BUCKETS - 1 :])

    def recommended(self, wanted: int, *, now: float, window_seconds: float, needed: int | None = None) -> "History":
        """Remember one recommendation, and what it would be without what must stand ready (`needed`; None: the same);
        forget what is older than the window."""
        needed = wanted if needed is None else needed
        length = bucket_seconds(window_seconds)
        buckets = tuple(bucket for bucket in self.buckets if now - window_seconds < bucket.start + length)
        last = buckets[-1] if buckets else None
        if last is not None and last.start <= now < last.start + length:
            known = wanted if last.min_wanted is None else last.min_wanted
            most = max(last.most_needed, needed)
            merged = Bucket(last.start, max(last.max_wanted, wanted), min(known, wanted), most)
            buckets = (*buckets[:-1], merged)
        else:
            buckets = (*buckets, Bucket(now, wanted, wanted, needed))
        return replace(self, buckets=buckets[-MAX_BUCKETS - 1 :], watched_at=now)

    def max_since(self, now: float, *, window_seconds: float, bucket_window_seconds: float) -> int | None:
        """The highest recommendation of the last `window_seconds`; None when there was none."""
        length = bucket_seconds(bucket_window_seconds)
        inside = [bucket.max_wanted for bucket in self.buckets if bucket.start + length > now - window_seconds]
        return max(inside, default=None)

    def max_needed_since(self, now: float, *, window_seconds: float, bucket_window_seconds: float) -> int | None:
        """The same without what had to stand ready."""
        length = bucket_seconds(bucket_window_seconds)
        inside = [bucket.most_needed for bucket in self.buckets if bucket.start + length > now - window_seconds]
        return max(inside, default=None)

    def min_since(self, now: float, *, window_seconds: float, bucket_window_seconds: float) -> int | None:
        """The lowest recommendation of the last `window_seconds`; None when there was none."""
        length = bucket_seconds(bucket_window_seconds)
        inside = [
            bucket.min_wanted
            for bucket in self.buckets
            if bucket.min_wanted is not None and bucket.start + length > now - window_seconds
        ]
        return min(inside, default=None)

    def changed(self, change: int, *, now: float) -> "History":
        """Remember that the wanted replicas changed by `change`."""
        return replace(self, changes=(*self.changes, Change(now, change))[-MAX_CHANGES:])

    def demanded(self, point: Point) -> "History":
        """Remember the demand of one round; those of other times than the last TREND_SECONDS are forgotten."""
        kept = (old for old in self.demand if point.time - TREND_SECONDS < old.time <= point.time)
        return replace(self, demand=(*kept, point)[-MAX_CHANGES:])

    def started(self, starts: Iterable[tuple[str, float]]) -> "History":
        """Remember measured start-ups, each pod once."""
        known = {pod for pod, _ in self.starts}
        new = tuple(start for start in starts if start[0] not in known)
        return replace(self, starts=(*self.starts, *new)[-MAX_STARTS:]) if new else self

    def added_since(self, start: float, now: float) -> int:
        """Replicas added after `start`; changes later than `now`, before a clock went back, do not count."""
        return sum(change.change for change in self.changes if start < change.time <= now and change.change > 0)

    def removed_since(self, start: float, now: float) -> int:
        """Replicas removed after `start`."""
        return -sum(change.change for change in self.changes if start < change.time <= now and change.change < 0)

    def turned_over(self, seconds: float) -> "History":
        """Learn how long a request runs."""
        known = self.turnover_seconds
        learnt = seconds if known is None else known + TURNOVER_WEIGHT * (seconds - known)
        return replace(self, turnover_seconds=learnt)

    def saturated_at(self, running: float) -> "History":
        """Learn how many requests a replica runs when requests wait."""
        known = self.saturation_running
        learnt = running if known is None else known + KNEE_WEIGHT * (running - known)
        return replace(self, saturation_running=learnt)

    def ran(self, running: int) -> "History":
        """A replica that runs more than the known saturation proves it too low."""
        if self.saturation_running is None or running <= self.saturation_running:
            return self
        return replace(self, saturation_running=float(running))


def bucket_seconds(window_seconds: float) -> float:
    """Length of a bucket: a twelfth of the window, at least one second."""
    return max(1.0, window_seconds / MAX_BUCKETS)
