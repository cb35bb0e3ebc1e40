"""The latency objective: is it met, and would more replicas help? Pure."""

import math
from dataclasses import dataclass

from pagefleet_operator.fleet import Fleet
from pagefleet_operator.history import History
from pagefleet_operator.latency import WINDOW_SECONDS, Latencies
from pagefleet_operator.model import Slo

MIN_SAMPLES = 20
"""Requests that a percentile needs."""
MISSED = 1.1
"""Observed / target from which the objective counts as missed."""
COMFORTABLE = 0.8
"""Observed / target up to which a smaller fleet may be tried."""
MAX_STEP = 2.0
"""One decision multiplies the fleet at most by this."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the objective says."""

    replicas: int | None
    """Wanted count; None: no opinion."""
    met: bool
    reason: str
    """ObjectiveMet, ObjectiveMissed, ObjectiveNotCapacityBound, TooFewSamples or Settling."""
    ratio: float | None = None
    """Worst observed / target; None when not known."""


def judge(slo: Slo, fleet: Fleet, history: History, *, is_saturated: bool, now: float) -> Verdict:
    """`is_saturated`: requests wait, or replicas run as many as they ever could.

    After a scale-up the fleet is kept as it is until the new replicas have been ready for one window: the past stays
    bad and must neither wind the fleet up nor be forgotten.
    """
    ratio = _ratio(slo, fleet.latencies)
    if ratio is None:
        return Verdict(None, met=True, reason="TooFewSamples")
    kept = None if ratio <= COMFORTABLE else fleet.replicas
    if history.unsettled_at is not None and 0 <= now - history.unsettled_at < WINDOW_SECONDS:
        return Verdict(kept, met=ratio < MISSED, reason="Settling", ratio=ratio)
    if ratio < MISSED:
        return Verdict(kept, met=True, reason="ObjectiveMet", ratio=ratio)
    if not is_saturated:
        return Verdict(None, met=False, reason="ObjectiveNotCapacityBound", ratio=ratio)
    # What waits makes full replicas late out of all proportion to what they lack: the root of the ratio, not the ratio.
    wanted = math.ceil(len(fleet.sampled) * min(math.sqrt(ratio), MAX_STEP))
    return Verdict(max(wanted, fleet.replicas), met=False, reason="ObjectiveMissed", ratio=ratio)


def _ratio(slo: Slo, latencies: Latencies) -> float | None:
    part = slo.percentile / 100
    ratios: list[float] = []
    for target_ms, histogram in (
        (slo.time_to_first_token_ms, latencies.time_to_first_token),
        (slo.inter_token_latency_ms, latencies.inter_token),
    ):
        if target_ms is not None and histogram.total >= MIN_SAMPLES:
            observed = histogram.quantile(part)
            if observed is not None:
                ratios.append(1000 * observed / target_ms)
    return max(ratios, default=None)
