"""llm-d's workload-variant autoscaler, V1 (percent) and V2 (tokens), for one variant.

After its saturation-scaling configuration and internal/engines/analyzers: a loop of 15 s. V1 adds one replica when the
mean spare occupancy of the replicas that are not saturated is below 0.10 or their spare queue below 3, removes one
when the rest would keep that much; it waits while replicas are pending. V2 counts tokens: capacity is the smaller of
0.80 of the cache and what was in use when 5 or more requests waited; it jumps by the missing capacity, with
hysteresis. Its gauge reaches the fleet through a horizontal pod autoscaler; only that one's scale-down window is
modelled.
"""

import math
from collections import deque
from dataclasses import dataclass

from pagefleet_operator.fleet import Fleet, Sample
from pagefleet_simulator.policies.policy import Window, num_pending, num_ready

KV_THRESHOLD = 0.80
QUEUE_THRESHOLD = 5.0
SPARE_KV = 0.10
SPARE_QUEUE = 3.0
LEARNT_SAMPLES = 10


@dataclass(frozen=True, slots=True)
class WvaSettings:
    """Thresholds of both versions."""

    kv_threshold: float = KV_THRESHOLD
    queue_threshold: float = QUEUE_THRESHOLD
    spare_kv: float = SPARE_KV
    spare_queue: float = SPARE_QUEUE
    scale_up_utilisation: float = 0.85
    scale_down_utilisation: float = 0.70
    down_window_seconds: float = 0.0


class WvaPercent:
    """V1."""

    name = "WVA V1"
    period_seconds = 15.0

    def __init__(self, settings: WvaSettings) -> None:
        self._settings = settings
        self._down = _Down(settings.down_window_seconds)

    def decide(self, fleet: Fleet, now: float) -> int:
        """One loop."""
        samples = _samples(fleet)
        if not samples or num_pending(fleet):
            return fleet.replicas
        return self._down.hold(fleet.replicas, self._want(fleet, samples), now)

    def _want(self, fleet: Fleet, samples: list[Sample]) -> int:
        limits = self._settings
        free = [
            (item.blocks_used / item.blocks_total, float(item.waiting))
            for item in samples
            if item.blocks_used / item.blocks_total < limits.kv_threshold and item.waiting < limits.queue_threshold
        ]
        if not free:
            return fleet.replicas + 1
        spare_kv = sum(limits.kv_threshold - kv for kv, _ in free) / len(free)
        spare_queue = sum(limits.queue_threshold - queue for _, queue in free) / len(free)
        if spare_kv < limits.spare_kv or spare_queue < limits.spare_queue:
            return fleet.replicas + 1
        if len(free) < 2:
            return fleet.replicas
        rest = len(free) - 1
        kv_after = sum(kv for kv, _ in free) / rest
        queue_after = sum(queue for _, queue in free) / rest
        fits = (
            limits.kv_threshold - kv_after >= limits.spare_kv
            and limits.queue_threshold - queue_after >= limits.spare_queue
        )
        return fleet.replicas - 1 if fits else fleet.replicas


class WvaTokens:
    """V2; blocks stand for tokens."""

    name = "WVA V2"
    period_seconds = 15.0

    def __init__(self, settings: WvaSettings, *, mean_prompt_blocks: float) -> None:
        """`mean_prompt_blocks`: what a waiting request counts for, the mean input of the trace."""
        self._settings = settings
        self._prompt_blocks = mean_prompt_blocks
        self._seen: deque[float] = deque(maxlen=LEARNT_SAMPLES)
        self._down = _Down(settings.down_window_seconds)

    def decide(self, fleet: Fleet, now: float) -> int:
        """One loop."""
        samples = _samples(fleet)
        if not samples:
            return fleet.replicas
        limits = self._settings
        self._seen += [float(item.blocks_used) for item in samples if item.waiting >= limits.queue_threshold]
        capacity = limits.kv_threshold * sum(item.blocks_total for item in samples) / len(samples)
        if self._seen:
            capacity = max(1.0, min(capacity, sum(self._seen) / len(self._seen)))
        demand = sum(item.blocks_used + item.waiting * self._prompt_blocks for item in samples)
        supply = (num_ready(fleet) + num_pending(fleet)) * capacity
        wanted = fleet.replicas
        if demand / limits.scale_up_utilisation > supply:
            wanted += math.ceil((demand / limits.scale_up_utilisation - supply) / capacity)
        elif demand / limits.scale_down_utilisation < supply:
            wanted -= math.floor((supply - demand / limits.scale_down_utilisation) / capacity)
        return self._down.hold(fleet.replicas, wanted, now)


class _Down:
    """The scale-down window of the autoscaler that follows the gauge."""

    def __init__(self, seconds: float) -> None:
        self._window = Window(seconds) if seconds > 0 else None

    def hold(self, current: int, wanted: int, now: float) -> int:
        if self._window is None:
            return wanted
        if not len(self._window):  # as that autoscaler does at its start
            self._window.add(now, current)
        self._window.add(now, wanted)
        return wanted if wanted >= current else min(current, int(self._window.maximum))


def _samples(fleet: Fleet) -> list[Sample]:
    return [pod.sample for pod in fleet.sampled if pod.sample is not None]
