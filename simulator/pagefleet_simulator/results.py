"""What a run came to: attainment, failures, cost and calm."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pagefleet_simulator.scenario import Scenario
from pagefleet_simulator.simulation import Outcome

QUEUED_SECONDS = 1.0
"""A request whose first step began later than this after its arrival was queued."""

REVERSAL_SECONDS = 600.0
"""A change of direction this soon after the last change is a reversal."""


@dataclass(frozen=True, slots=True)
class Result:
    """Of one run after its warm-up. Latencies are infinite where requests failed."""

    requests: int
    attainment_percent: float
    """Requests within the objective; a failed one is not."""
    failed: int
    """Refused, without a pod, lost with one, or unfinished at the end."""
    queued: int
    p95_first_token_seconds: float
    p99_first_token_seconds: float
    p95_time_per_token_seconds: float
    device_hours: float
    changes: int
    reversals: int
    most_replicas: int


def summarise(scenario: Scenario, outcome: Outcome) -> Result:
    """Numbers of a run."""
    objective, warm = scenario.objective, scenario.warmup_seconds
    served = [item for item in outcome.served if item.arrival.time >= warm]
    changes = [change for change in outcome.changes if change[0] >= warm]
    good = sum(
        not item.failed
        and item.time_to_first_token <= objective.time_to_first_token_seconds
        and item.time_per_token <= objective.time_per_token_seconds
        for item in served
    )
    first = sorted(math.inf if item.failed else item.time_to_first_token for item in served)
    per_token = sorted(item.time_per_token for item in served)
    return Result(
        requests=len(served),
        attainment_percent=100 * good / len(served) if served else 100.0,
        failed=sum(item.failed for item in served),
        queued=sum(
            item.first_scheduled is None or item.first_scheduled - item.arrival.time > QUEUED_SECONDS for item in served
        ),
        p95_first_token_seconds=percentile(first, 95),
        p99_first_token_seconds=percentile(first, 99),
        p95_time_per_token_seconds=percentile(per_token, 95),
        device_hours=outcome.device_seconds / 3600,
        changes=len(changes),
        reversals=count_reversals(changes),
        most_replicas=max((point.wanted for point in outcome.timeline if point.time >= warm), default=0),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Nearest rank; 0 of nothing."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, math.ceil(percent / 100 * len(ordered)) - 1))]


def count_reversals(changes: Sequence[tuple[float, int, int]]) -> int:
    """Changes against the direction of the one before, within REVERSAL_SECONDS of it."""
    return sum(
        (after[2] > after[1]) != (before[2] > before[1]) and after[0] - before[0] <= REVERSAL_SECONDS
        for before, after in pairwise(changes)
    )
