"""PageFleet: exactly the operator's decision and the operator's memory."""

from pagefleet_operator.autoscale import Decision, decide
from pagefleet_operator.fleet import Fleet
from pagefleet_operator.history import History
from pagefleet_operator.latency import LatencyWindow
from pagefleet_operator.model import AutoscalingSpec
from pagefleet_operator.status import restore_history


class PageFleet:
    """Decides after each scrape round, as the operator does."""

    name = "PageFleet"

    def __init__(self, spec: AutoscalingSpec, *, period_seconds: float = 2.0) -> None:
        self.period_seconds = period_seconds
        self.last: Decision | None = None
        self._spec = spec
        self._history: History | None = None
        self._window = LatencyWindow()

    def decide(self, fleet: Fleet, now: float) -> int:
        """The operator's decision."""
        if self._history is None:  # as an operator that starts: what nobody watched was needed
            self._history, _ = restore_history({}, replicas=fleet.replicas, now=now)
        latencies = self._window.observe(
            {pod.name: (pod.sample.time, pod.sample.latencies) for pod in fleet.pods if pod.sample is not None}, now
        )
        seen = Fleet(fleet.replicas, fleet.pods, latencies)
        self.last = decide(self._spec, seen, self._history, now)
        self._history = self.last.history
        if self.last.replicas != fleet.replicas:
            self._history = self._history.changed(self.last.replicas - fleet.replicas, now=now)
        return self.last.replicas
