"""What the fleet has to carry, from its samples: in KV-cache blocks and in requests. Pure.

What counts is what came within one turnover, the time that a request runs. Without a queue that is what runs now. Where
requests wait, all that came since the oldest of them came is in the queue, so its size over its age is the rate of
arrivals: within one turnover this much came. Counting all of an old queue instead would size the fleet for a backlog
that new replicas cannot take over: a request stays with the replica that accepted it.
"""

from collections.abc import Collection, Iterable

from pagefleet_operator.fleet import Sample
from pagefleet_operator.forecast import Point
from pagefleet_operator.latency import WINDOW_SECONDS, Latencies

MIN_FIRST_TOKENS = 10
"""First tokens of the last window that a turnover needs."""


def demand_of(samples: Iterable[Sample], turnover: float | None, now: float) -> Point:
    """Demand of the sampled pods at `now`. Without a `turnover` (seconds) all that waits counts in full."""
    blocks = requests = 0.0
    for sample in samples:
        old = 0.0 if turnover is None else _part_that_is_old(sample.oldest_waiting_seconds, turnover)
        recent = 1.0 if turnover is None else min(1.0, turnover / max(turnover, sample.oldest_waiting_seconds))
        blocks += max(sample.blocks_used, sample.blocks_used * (1 - old) + sample.blocks_waiting * recent)
        requests += max(sample.running, sample.running * (1 - old) + sample.waiting * recent)
    return Point(now, blocks, requests)


def turnover_seconds(running: int, latencies: Latencies) -> float | None:
    """How long a request runs, by Little's law from the fleet's last window; None: not known.

    It holds for a fleet in balance: while load rises the window lags, and this is too long.
    """
    first_tokens = latencies.time_to_first_token.total
    return None if first_tokens < MIN_FIRST_TOKENS or not running else running * WINDOW_SECONDS / first_tokens


def is_balanced(samples: Collection[Sample]) -> bool:
    """Whether the last window tells the turnover: nothing waits, or every replica was full all through the window.

    A full replica takes longer for each request, so that a turnover learnt from idle ones alone would be too short.
    """
    if not any(sample.waiting for sample in samples):
        return True
    return all(sample.waiting and sample.oldest_waiting_seconds >= WINDOW_SECONDS for sample in samples)


def _part_that_is_old(oldest_seconds: float, turnover: float) -> float:
    """Of what runs, the part that came before the last turnover, 0..1: all when even the queue is older."""
    return min(1.0, oldest_seconds / turnover)
