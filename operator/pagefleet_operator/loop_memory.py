"""What the loop of one LLMDeployment remembers between two reconciles. No I/O."""

from dataclasses import dataclass, field
from typing import Any

from pagefleet_operator import apply, drift
from pagefleet_operator.errors import ApiError
from pagefleet_operator.plan import Plan
from pagefleet_operator.scaling import Scaling
from pagefleet_operator.settings import ReconcileSettings


@dataclass(frozen=True, slots=True)
class Refusal:
    """Children that the API did not take."""

    digest: str
    """Of all their manifests."""
    at: float
    reason: str
    message: str
    may_pass: bool = False
    """By itself, as an outage does."""


def fingerprint(intended: Plan) -> str:
    """Of all its manifests."""
    return drift.digest({"manifests": list(intended.manifests)})


def refusal(error: ApiError, digest: str, now: float) -> Refusal:
    """What the API did not take, in words for people."""
    if error.is_transient:
        message = f"a child could not be written several times running: {error}"
        return Refusal(digest, now, "ApplyFailed", message, may_pass=True)
    refused = "InvalidTemplate" if error.child in (None, "Deployment") else "ChildRefused"
    reason = "Forbidden" if error.status == 403 else refused
    return Refusal(digest, now, reason, f"the API refused a child: {error.message}")


@dataclass(slots=True)
class Memory:
    """What one loop remembers of one incarnation (uid) of its object."""

    uid: str
    scaling: Scaling = field(default_factory=Scaling)
    ledger: apply.Ledger = field(default_factory=apply.Ledger)
    found: dict[str, Any] = field(default_factory=dict)
    """Children that the watch does not show, as last read."""
    found_at: float | None = None
    found_for: int = 0
    """The generation for which they were read."""
    refused: Refusal | None = None
    """What the API did not take; the same is not sent again at once."""
    apply_failures: int = 0
    """Running failures to write the children."""
    victims_since: float | None = None
    """Since when a shrink waits for the victims' costs to be seen."""
    status_at: float | None = None
    """When the status was last written."""
    turn: float | None = None
    """When changed numbers may be written, once they have been given a turn."""

    def held(self, digest: str, now: float, settings: ReconcileSettings) -> Refusal | None:
        """Why children with this digest are not to be sent again yet. What may pass by itself is tried at pauses that
        double: a short outage costs no long one."""
        refused = self.refused
        if refused is None or refused.digest != digest:
            return None
        pause = settings.max_backoff_seconds
        if refused.may_pass:
            pause = min(pause, settings.min_backoff_seconds * 2 ** min(self.apply_failures, 16))
        return refused if now - refused.at < pause else None
