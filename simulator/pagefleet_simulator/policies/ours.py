"""PageFleet: exactly the operator's decision and the operator's memory."""

from collections.abc import Mapping
from typing import Any

from pagefleet_operator.autoscale import Decision, decide
from pagefleet_operator.fleet import Fleet
from pagefleet_operator.history import History
from pagefleet_operator.latency import LatencyWindow
from pagefleet_operator.memory import remember, restore_history
from pagefleet_operator.model import AutoscalingSpec


class PageFleet:
    """Decides after each scrape round, as the operator does.

    `memory`: `status.autoscaling.history` as an earlier operator left it; it is read as a new operator reads it.
    """

    name = "PageFleet"

    def __init__(
        self, spec: AutoscalingSpec, *, period_seconds: float = 2.0, memory: Mapping[str, Any] | None = None
    ) -> None:
        self.period_seconds = period_seconds
        self.last: Decision | None = None
        self._spec = spec
        self._memory = memory or {}
        self._history: History | None = None
        self._window = LatencyWindow()

    def decide(self, fleet: Fleet, now: float) -> int:
        """The operator's decision."""
        if self._history is None:  # as an operator that starts: what nobody watched was needed
            status = {"autoscaling": {"history": self._memory}}
            self._history, _ = restore_history(status, replicas=fleet.replicas, now=now)
        latencies = self._window.observe(
            {pod.name: (pod.sample.time, pod.sample.latencies) for pod in fleet.pods if pod.sample is not None}, now
        )
        seen = Fleet(fleet.replicas, fleet.pods, latencies)
        self.last = decide(self._spec, seen, self._history, now)
        self._history = self.last.history
        if self.last.replicas != fleet.replicas:
            self._history = self._history.changed(self.last.replicas - fleet.replicas, now=now)
        return self.last.replicas

    def memory(self) -> dict[str, Any]:
        """What it has learnt, as the operator writes it, when so much time has passed that all windows are over."""
        if self._history is None or self.last is None:
            return {}
        return {**remember(self._history, recommended=self.last.recommended), "buckets": []}
