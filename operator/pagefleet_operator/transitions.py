"""Which Events a change of status deserves. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Transition:
    """One Event to say."""

    reason: str
    message: str
    warning: bool = False


def transitions(last: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Transition]:
    """Events for conditions that turned, by their new reason."""
    before = {item.get("type"): item for item in last.get("conditions") or []}
    for condition in new.get("conditions") or []:
        kind, status, reason = condition["type"], condition["status"], condition["reason"]
        known = before.get(kind, {})
        turned = known.get("status") != status
        if kind == "Degraded" and status == "True" and (turned or known.get("reason") != reason):
            yield Transition(reason, condition["message"], warning=True)
        elif kind == "Degraded" and turned and known:
            yield Transition("Recovered", f"no longer {known.get('reason')}")
        elif kind == "Available" and turned and status == "True":
            yield Transition("Available", condition["message"])
        elif kind == "Available" and turned and known:
            yield Transition(reason, condition["message"], warning=reason != "ScaledToZero")
        elif kind == "ScalingActive" and turned and known and status == "False":
            yield Transition(reason, condition["message"], warning=True)
