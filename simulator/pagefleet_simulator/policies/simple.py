"""KubeAI's autoscaler, and a fleet that never changes."""

import math
from dataclasses import dataclass

from pagefleet_operator.fleet import Fleet
from pagefleet_simulator.policies.policy import Window


@dataclass(frozen=True, slots=True)
class KubeAiSettings:
    """A model's targetRequests and scaleDownDelaySeconds, and the system's time window."""

    target_requests: float = 10.0
    window_seconds: float = 600.0
    scale_down_delay_seconds: float = 30.0


class KubeAi:
    """After kubeai internal/modelautoscaler: every 10 s the mean of active requests over a window, divided by the
    target; it shrinks after several such decisions in a row."""

    name = "KubeAI"
    period_seconds = 10.0

    def __init__(self, settings: KubeAiSettings) -> None:
        self._settings = settings
        self._window = Window(settings.window_seconds)
        self._consecutive = 0

    def decide(self, fleet: Fleet, now: float) -> int:
        """One interval; it is skipped while a replica says nothing."""
        samples = [pod.sample for pod in fleet.sampled if pod.sample is not None]
        if not samples or fleet.missing:
            return fleet.replicas
        self._window.add(now, sum(sample.running + sample.waiting for sample in samples))
        wanted = max(1, math.ceil(self._window.mean / self._settings.target_requests))
        if wanted >= fleet.replicas:
            self._consecutive = 0
            return wanted
        self._consecutive += 1
        needed = math.ceil(self._settings.scale_down_delay_seconds / self.period_seconds)
        return wanted if self._consecutive > needed else fleet.replicas


class Static:
    """Always the same count."""

    period_seconds = 60.0

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    @property
    def name(self) -> str:
        """With its count."""
        return "Static"

    def decide(self, fleet: Fleet, now: float) -> int:
        """The count."""
        return self._replicas
