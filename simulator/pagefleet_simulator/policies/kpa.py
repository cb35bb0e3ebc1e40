"""Knative's pod autoscaler: concurrency over a stable and a panic window.

After knative serving pkg/autoscaler/scaling/autoscaler.go: a tick every 2 s; stable window 60 s, panic window a tenth;
panic when the panic window asks for twice what is ready, never down in panic, out of it after a stable window below;
at most half the ready pods go in one tick; scale-down-delay keeps the highest of its window.
"""

import math
from dataclasses import dataclass

from pagefleet_operator.fleet import Fleet
from pagefleet_simulator.policies.policy import Window, num_ready

PANIC_THRESHOLD = 2.0
MAX_SCALE_DOWN_RATE = 2.0
MAX_SCALE_UP_RATE = 1000.0


@dataclass(frozen=True, slots=True)
class KpaSettings:
    """Knative's annotations."""

    target_concurrency: float = 10.0
    """Requests of one replica, at the utilisation that is wanted."""
    stable_window_seconds: float = 60.0
    scale_down_delay_seconds: float = 0.0


class Kpa:
    """One decision is one tick."""

    name = "Knative KPA"
    period_seconds = 2.0

    def __init__(self, settings: KpaSettings) -> None:
        self._settings = settings
        self._stable = Window(settings.stable_window_seconds)
        self._panic = Window(settings.stable_window_seconds / 10)
        self._delayed = Window(settings.scale_down_delay_seconds) if settings.scale_down_delay_seconds > 0 else None
        self._panic_since: float | None = None
        self._panic_most = 0
        self._has_started = False

    def decide(self, fleet: Fleet, now: float) -> int:
        """One tick; without metrics nothing changes."""
        samples = [pod.sample for pod in fleet.sampled if pod.sample is not None]
        if not samples:
            return fleet.replicas
        # Pods are sampled; the mean of those seen stands for the ready ones.
        ready = max(1, num_ready(fleet))
        total = sum(sample.running + sample.waiting for sample in samples) * ready / len(samples)
        self._stable.add(now, total)
        self._panic.add(now, total)
        lowest, highest = math.floor(ready / MAX_SCALE_DOWN_RATE), math.ceil(ready * MAX_SCALE_UP_RATE)
        target = self._settings.target_concurrency
        stable = min(max(math.ceil(self._stable.mean / target), lowest), highest)
        panic = min(max(math.ceil(self._panic.mean / target), lowest), highest)
        if not self._has_started and ready > 1:  # a restart must not shrink the fleet: it begins in panic
            self._panic_since, self._panic_most = now, ready
        self._has_started = True
        if math.ceil(self._panic.mean / target) / ready >= PANIC_THRESHOLD:
            if self._panic_since is None:
                self._panic_most = 0
            self._panic_since = now
        elif self._panic_since is not None and now - self._panic_since > self._settings.stable_window_seconds:
            self._panic_since = None
        if self._panic_since is not None:
            self._panic_most = max(self._panic_most, panic, stable, ready)
            wanted = self._panic_most
        else:
            wanted = stable
        if self._delayed is not None:
            self._delayed.add(now, wanted)
            wanted = int(self._delayed.maximum)
        return wanted
