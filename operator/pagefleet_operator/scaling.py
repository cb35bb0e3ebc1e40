"""The autoscaler of one LLMDeployment between two decisions: its memory, and when to decide again. No I/O."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagefleet_operator.autoscale import Decision, decide
from pagefleet_operator.fleet import PodState
from pagefleet_operator.history import History
from pagefleet_operator.latency import Latencies, LatencyWindow
from pagefleet_operator.memory import restore_history
from pagefleet_operator.model import LLMDeployment
from pagefleet_operator.plan import Observed
from pagefleet_operator.status import MAX_DECISIONS
from pagefleet_operator.times import timestamp


@dataclass(slots=True)
class Scaling:
    """Remembers decisions of one LLMDeployment. One per uid."""

    history: History = field(default_factory=History)
    decision: Decision | None = None
    decisions: list[Mapping[str, Any]] = field(default_factory=list)
    """Changes made, newest last, as they stand in status."""
    overwritten: str | None = None
    latencies: Latencies = field(default_factory=Latencies)
    """What all pods observed in the last window, as of the last scrape round."""
    failure: str | None = None
    """Why the last write of spec.replicas failed."""
    _window: LatencyWindow = field(default_factory=LatencyWindow)
    _starting: frozenset[str] | set[str] = frozenset()
    """Pods that we saw starting."""
    _restored: bool = False
    _round: int = 0
    _open: Decision | None = None
    """The last round's decision while it has not been written."""
    _written: int | None = None
    """Replicas as we last wrote them, or found them at first."""

    def decide(
        self,
        llmd: LLMDeployment,
        observed: Observed,
        *,
        scrape_round: int,
        now: float,
        allowance: Callable[[LLMDeployment], int | None] = lambda _: None,
    ) -> Decision | None:
        """A decision that changes spec.replicas, or None. Decides once per finished scrape round; until the next one it
        is the same, as long as it was neither written nor given up.

        `allowance` says how many replicas the budget of devices leaves; it is asked only then. Memory is read back at
        the first call, before anything is decided: the status is written from it.
        """
        autoscaling = llmd.spec.autoscaling
        if autoscaling is not None and not self._restored:
            self.history, self.decisions = restore_history(llmd.status, replicas=llmd.spec.replicas, now=now)
            self._restored, self._written = True, llmd.spec.replicas
        if scrape_round == self._round:
            return self._still_open(llmd, allowance)
        self._round, self._open = scrape_round, None
        samples = observed.samples.items()
        self.latencies = self._window.observe({name: (item.time, item.latencies) for name, item in samples}, now)
        names = {pod.name for pod in observed.pods}
        starting = {pod.name for pod in observed.pods if pod.state is PodState.STARTING}
        self._starting = (self._starting & names) | starting
        if autoscaling is None:
            self.decision = None
            return None
        fleet = observed.fleet(llmd.spec.replicas, self.latencies, self._starting)
        self.decision = decide(autoscaling, fleet, self.history, now, allowance=allowance(llmd))
        self.history = self.decision.history
        if autoscaling.mode == "DryRun" or self.decision.replicas == llmd.spec.replicas:
            return None
        self._open = self.decision
        return self._open

    def _still_open(self, llmd: LLMDeployment, allowance: Callable[[LLMDeployment], int | None]) -> Decision | None:
        """The round's decision, unless it is true by now or others have taken the devices meanwhile."""
        if self._open is not None:
            bound, replicas = allowance(llmd), self._open.replicas
            if replicas == llmd.spec.replicas or (bound is not None and replicas > max(bound, llmd.spec.replicas)):
                self._open = None
        return self._open

    def gave_up(self, failure: str | None) -> None:
        """Remember that the decision was not written, and why if that is worth saying: the next round decides anew."""
        self.failure, self._open = failure, None

    def scaled(self, llmd: LLMDeployment, decision: Decision, now: float) -> None:
        """Remember that the decision about `llmd` was written."""
        before = llmd.spec.replicas
        self.overwritten = (
            f"spec.replicas was set to {before} by hand; the autoscaler set it to {decision.replicas}"
            if self._written not in (None, before)
            else None
        )
        self.failure = self._open = None
        self._written = decision.replicas
        self.history = self.history.changed(decision.replicas - before, now=now)
        change = {
            "time": timestamp(now),
            "from": before,
            "to": decision.replicas,
            "inputs": str(decision.inputs),
            "reason": decision.reason + (f", limited by {decision.limited_by}" if decision.limited_by else ""),
        }
        self.decisions = [*self.decisions, change][-MAX_DECISIONS:]
