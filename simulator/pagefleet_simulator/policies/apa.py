"""AIBrix's APA: a ratio with bounds on each step.

After aibrix pkg/controller/podautoscaler/algorithm/apa.go: above 1 + 0.1 of the target the fleet grows by the ratio,
at most twofold; below 1 - 0.1 it shrinks by it, at most to half; shrinking keeps the highest of the cool-down. The
largest of several metrics counts: occupancy, and requests per replica.
"""

import math
from dataclasses import dataclass

from pagefleet_operator.fleet import Fleet
from pagefleet_simulator.policies.policy import Window

FLUCTUATION = 0.1
MAX_RATE = 2.0


@dataclass(frozen=True, slots=True)
class ApaSettings:
    """Targets of both metrics, and the cool-down."""

    occupancy_percent: float = 50.0
    requests: float | None = None
    """Running and waiting ones of a replica; None: occupancy alone."""
    down_cooldown_seconds: float = 300.0


class Apa:
    """One decision is one resync; means over 30 s, as its metric windows smooth."""

    name = "AIBrix APA"
    period_seconds = 10.0

    def __init__(self, settings: ApaSettings) -> None:
        self._settings = settings
        self._occupancy, self._requests = Window(30.0), Window(30.0)
        self._recommended = Window(settings.down_cooldown_seconds)

    def decide(self, fleet: Fleet, now: float) -> int:
        """The mean over the pods that answer stands for all of them."""
        samples = [pod.sample for pod in fleet.sampled if pod.sample is not None]
        if not samples:
            return fleet.replicas
        self._occupancy.add(now, sum(100 * item.blocks_used / item.blocks_total for item in samples) / len(samples))
        self._requests.add(now, sum(item.running + item.waiting for item in samples) / len(samples))
        wanted = scaled(fleet.replicas, self._occupancy.mean / self._settings.occupancy_percent)
        if self._settings.requests is not None:
            wanted = max(wanted, scaled(fleet.replicas, self._requests.mean / self._settings.requests))
        if not len(self._recommended):  # kinder than the original, which forgets its past at a restart
            self._recommended.add(now, fleet.replicas)
        self._recommended.add(now, wanted)
        return wanted if wanted >= fleet.replicas else min(fleet.replicas, int(self._recommended.maximum))


def scaled(current: int, ratio: float) -> int:
    """One step by the ratio of a metric to its target."""
    if ratio > 1 + FLUCTUATION:
        return min(math.ceil(current * ratio), math.ceil(MAX_RATE * current))
    if ratio < 1 - FLUCTUATION:
        return max(math.ceil(current * ratio), math.floor(current / MAX_RATE), 1)
    return current
