"""Makes a plan true: children by server-side apply, deletion costs, replicas through /scale, status."""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagefleet_operator import names
from pagefleet_operator.client import Api
from pagefleet_operator.errors import ApiError
from pagefleet_operator.model import LLMDeployment
from pagefleet_operator.plan import Applied, Observed, Plan, digest, managers_of, needs_apply, version_of
from pagefleet_operator.resources import CHILDREN, LLMDEPLOYMENTS, PODS
from pagefleet_operator.settings import ReconcileSettings

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Ledger:
    """What was applied of one LLMDeployment's children, and how often someone changed them back."""

    applied: dict[str, Applied] = field(default_factory=dict)
    repairs: dict[str, deque[float]] = field(default_factory=dict)
    """Times of repairs by kind, the newest last."""
    rivals: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Who had changed the child before its last repair, by kind."""

    def is_contested(self, kind: str, settings: ReconcileSettings, now: float) -> bool:
        """Whether someone keeps changing the child back."""
        times = self.repairs.get(kind)
        if times is None or len(times) < settings.contested_repairs:
            return False
        return now - times[0] <= settings.contested_window_seconds

    def pauses(self, kind: str, settings: ReconcileSettings, now: float) -> bool:
        """Whether a contested child must wait for its next repair."""
        return self.is_contested(kind, settings, now) and (
            now - self.repairs[kind][-1] < settings.contested_pause_seconds
        )


@dataclass(frozen=True, slots=True)
class Repair:
    """A child that someone had edited and that now is ours again."""

    kind: str
    managers: tuple[str, ...]
    """Who else holds fields of its spec, the latest writer first."""


@dataclass(slots=True)
class Outcome:
    """What apply_children did."""

    bodies: list[Mapping[str, Any]] = field(default_factory=list)
    """The children as the API returned them."""
    repairs: list[Repair] = field(default_factory=list)


async def apply_children(
    api: Api, plan: Plan, observed: Observed, ledger: Ledger, settings: ReconcileSettings, now: float
) -> Outcome:
    """Apply every child that needs it. Raises ApiError at the first that the API refuses."""
    outcome = Outcome()
    for manifest in plan.manifests:
        kind = manifest["kind"]
        live = observed.children.get(kind)
        before = ledger.applied.get(kind)
        if not needs_apply(manifest, live, before):
            continue
        if live is not None and before is not None and ledger.pauses(kind, settings, now):
            continue
        answer = await api.apply(CHILDREN[kind], manifest)
        after = Applied(digest(manifest), answer["metadata"]["uid"], version_of(answer))
        ledger.applied[kind] = after
        outcome.bodies.append(answer)
        was_edited = (
            live is not None
            and before is not None
            and before.digest == after.digest
            and before.uid == after.uid
            and after.version != version_of(live)
        )
        if was_edited and live is not None:
            times = ledger.repairs.setdefault(kind, deque(maxlen=settings.contested_repairs))
            times.append(now)
            ledger.rivals[kind] = tuple(managers_of(live))
            outcome.repairs.append(Repair(kind, ledger.rivals[kind]))
    return outcome


async def write_costs(api: Api, llmd: LLMDeployment, costs: Mapping[str, int | None]) -> None:
    """Write or take away pod-deletion-cost; a pod that is gone needs none. Raises ApiError."""
    for pod, cost in costs.items():
        value = None if cost is None else str(cost)
        body = {"metadata": {"annotations": {names.POD_DELETION_COST: value}}}
        try:
            await api.patch(PODS, llmd.key.namespace, pod, body)
        except ApiError as error:
            if error.status != 404:
                raise


async def write_scale(api: Api, llmd: LLMDeployment, replicas: int) -> None:
    """Set spec.replicas through the scale subresource. Raises ApiError."""
    body = {"spec": {"replicas": replicas}}
    await api.patch(LLMDEPLOYMENTS, llmd.key.namespace, llmd.key.name, body, subresource="scale")


async def write_status(api: Api, namespace: str, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `patch` into the status and return the object. Raises ApiError."""
    return await api.patch(LLMDEPLOYMENTS, namespace, name, {"status": dict(patch)}, subresource="status")
