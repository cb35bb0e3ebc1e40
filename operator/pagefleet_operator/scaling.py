"""The autoscaler of one LLMDeployment between two decisions: its memory, and when to decide again. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pagefleet_operator.autoscale import Decision, decide
from pagefleet_operator.history import History
from pagefleet_operator.model import LLMDeployment
from pagefleet_operator.plan import Observed
from pagefleet_operator.status import MAX_DECISIONS, restore_history, timestamp


@dataclass(slots=True)
class Scaling:
    """Remembers decisions of one LLMDeployment. One per uid."""

    history: History = field(default_factory=History)
    decision: Decision | None = None
    decisions: list[Mapping[str, Any]] = field(default_factory=list)
    """Changes made, newest last, as they stand in status."""
    overwritten: str | None = None
    failure: str | None = None
    """Why the last write of spec.replicas failed."""
    _restored: bool = False
    _round: int = 0
    _written: tuple[int, int] | None = None
    """(generation before our write, replicas written)."""

    def settle(self, llmd: LLMDeployment) -> LLMDeployment:
        """The object with the replicas that we wrote, as long as the watch still shows it before that write."""
        if self._written is not None and llmd.generation <= self._written[0]:
            return with_replicas(llmd, self._written[1])
        return llmd

    def decide(self, llmd: LLMDeployment, observed: Observed, *, scrape_round: int, now: float) -> Decision | None:
        """A decision that changes spec.replicas, or None. Decides once per finished scrape round."""
        autoscaling = llmd.spec.autoscaling
        if autoscaling is None:
            self.decision = None
            return None
        if not self._restored:
            self.history, self.decisions = restore_history(llmd.status, replicas=llmd.spec.replicas, now=now)
            self._restored = True
        if scrape_round == self._round:
            return None
        self._round = scrape_round
        self.decision = decide(autoscaling, observed.fleet(llmd.spec.replicas), self.history, now)
        self.history = self.decision.history
        return self.decision if self.decision.replicas != llmd.spec.replicas else None

    def scaled(self, llmd: LLMDeployment, decision: Decision, now: float) -> LLMDeployment:
        """Remember that the decision was written; returns the object as it is from now on."""
        before = llmd.spec.replicas
        expected = self._written[1] if self._written is not None else None
        self.overwritten = (
            f"spec.replicas was set to {before} by hand; the autoscaler set it to {decision.replicas}"
            if expected is not None and expected != before
            else None
        )
        self.failure = None
        self._written = (llmd.generation, decision.replicas)
        self.history = self.history.changed(decision.replicas - before, now=now)
        change = {
            "time": timestamp(now),
            "from": before,
            "to": decision.replicas,
            "inputs": str(decision.inputs),
            "reason": decision.reason + (f", limited by {decision.limited_by}" if decision.limited_by else ""),
        }
        self.decisions = [*self.decisions, change][-MAX_DECISIONS:]
        return with_replicas(llmd, decision.replicas)


def with_replicas(llmd: LLMDeployment, replicas: int) -> LLMDeployment:
    """The same object with another wanted count."""
    return replace(llmd, spec=replace(llmd.spec, replicas=replicas))
