"""Makes a plan true: children by server-side apply, deletion costs, replicas through /scale, status."""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pagefleet_operator import names
from pagefleet_operator.builders import Manifest
from pagefleet_operator.client import Api
from pagefleet_operator.drift import Applied, applied, managers_of, needs_apply, was_edited
from pagefleet_operator.errors import ApiError
from pagefleet_operator.model import LLMDeployment
from pagefleet_operator.plan import Observed, Plan
from pagefleet_operator.resources import EVERY_CHILD, LLMDEPLOYMENTS, PODS
from pagefleet_operator.settings import ReconcileSettings

logger = logging.getLogger(__name__)


LAST = "Deployment"
"""The kind that is applied when all others are there."""

MAX_COSTS = 20
"""Deletion costs that one step writes."""

NO_OBJECT = "1"
"""resourceVersion of an apply that may only create: where there is no object it is not looked at, and none has it, as
the store's first object has a higher one. So a creation that comes late changes nothing that others made meanwhile."""


@dataclass(slots=True)
class Ledger:
    """What was applied of one LLMDeployment's children, and how often someone changed them back."""

    applied: dict[str, Applied] = field(default_factory=dict)
    repairs: dict[str, deque[float]] = field(default_factory=dict)
    """Times of repairs by kind, the newest last."""
    rivals: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Who had changed the child before its last repair, by kind."""
    settled: dict[str, tuple[Manifest, Mapping[str, Any]]] = field(default_factory=dict)
    """The manifest and the live child that were last found to agree, by kind: what a child is compared with first."""

    @property
    def replicas(self) -> int | None:
        """What the Deployment was last told."""
        deployment = self.applied.get("Deployment")
        return None if deployment is None else int(deployment.manifest["spec"]["replicas"])

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
    failure: ApiError | None = None
    """The first thing that went wrong; the rest happened all the same."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a plan still has to write."""

    costs: Mapping[str, int | None]
    """Deletion costs of this step: the others are written in the next one."""
    writes: int
    """At most, Events about repairs included."""
    is_repetition: bool
    """Only children that are there and that this process has not applied yet, of a spec that was followed."""


def outstanding(
    llmd: LLMDeployment, plan: Plan, observed: Observed, ledger: Ledger, settings: ReconcileSettings, now: float
) -> Work:
    """What `write_costs`, `apply_children` and `remove_children` will send."""
    kinds = [item["kind"] for item in plan.manifests if _is_due(item, observed, ledger, settings, now)]
    costs = dict(islice(plan.costs.items(), MAX_COSTS))
    applied_before = sum(kind in ledger.applied for kind in kinds)
    followed = llmd.status.get("observedGeneration") == llmd.generation
    return Work(
        costs=costs,
        writes=len(costs) + len(kinds) + applied_before + len(plan.removals),
        is_repetition=followed
        and not (costs or plan.removals or applied_before)
        and all(kind in observed.children for kind in kinds),
    )


async def apply_children(
    api: Api, plan: Plan, observed: Observed, ledger: Ledger, settings: ReconcileSettings, now: float
) -> Outcome:
    """Apply every child that needs it: the Deployment last, as its pods need some of the others; those all at once.

    One that fails keeps others from being written only when it is not there at all and the Deployment may need it. What
    was written is in the outcome.
    """
    outcome = Outcome()
    due = [manifest for manifest in plan.manifests if _is_due(manifest, observed, ledger, settings, now)]
    for wave in (
        [manifest for manifest in due if manifest["kind"] != LAST],
        [manifest for manifest in due if manifest["kind"] == LAST],
    ):
        tries = (_apply_child(api, manifest, observed, ledger, settings, now, outcome) for manifest in wave)
        failures = [failure for failure in await asyncio.gather(*tries) if failure is not None]
        outcome.failure = outcome.failure or next(iter(failures), None)
        if any(failure.child not in observed.children for failure in failures):
            break
    return outcome


def _is_due(manifest: Manifest, observed: Observed, ledger: Ledger, settings: ReconcileSettings, now: float) -> bool:
    kind = manifest["kind"]
    live, before = observed.children.get(kind), ledger.applied.get(kind)
    wished, seen = ledger.settled.get(kind, (None, None))
    if live is not None and live is seen and manifest == wished:
        return False
    if not needs_apply(manifest, live, before):
        if live is not None:
            ledger.settled[kind] = (manifest, live)
        return False
    return live is None or before is None or not ledger.pauses(kind, settings, now)


async def _apply_child(
    api: Api,
    manifest: Manifest,
    observed: Observed,
    ledger: Ledger,
    settings: ReconcileSettings,
    now: float,
    outcome: Outcome,
) -> ApiError | None:
    """Adds to `ledger` and `outcome`; returns what went wrong."""
    kind = manifest["kind"]
    live, before = observed.children.get(kind), ledger.applied.get(kind)
    try:
        answer = await api.apply(EVERY_CHILD[kind], _with_preconditions(manifest, live))
    except ApiError as error:
        error.child = kind
        return error
    ledger.applied[kind] = applied(manifest, answer)
    outcome.bodies.append(answer)
    if live is not None and before is not None and was_edited(live, before):
        times = ledger.repairs.setdefault(kind, deque(maxlen=settings.contested_repairs))
        times.append(now)
        ledger.rivals[kind] = tuple(managers_of(live))
        outcome.repairs.append(Repair(kind, ledger.rivals[kind]))
    return None


async def remove_children(
    api: Api, llmd: LLMDeployment, plan: Plan, observed: Observed, ledger: Ledger
) -> list[Mapping[str, Any]]:
    """Delete the children that the spec no longer wants; returns their last bodies. Raises ApiError."""
    removed = []
    for kind in plan.removals:
        child = observed.children[kind]
        seen = child["metadata"]
        await api.delete(
            EVERY_CHILD[kind], llmd.key.namespace, llmd.key.name, uid=seen["uid"], version=seen["resourceVersion"]
        )
        ledger.applied.pop(kind, None)
        ledger.settled.pop(kind, None)
        removed.append(child)
    return removed


def _with_preconditions(manifest: Manifest, live: Mapping[str, Any] | None) -> Manifest:
    """The manifest for exactly what we looked at, also where that was nothing: anything else is a 409."""
    if live is None:
        return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": NO_OBJECT}}
    known = live.get("metadata", {})
    metadata = {**manifest["metadata"], "uid": known.get("uid"), "resourceVersion": known.get("resourceVersion")}
    return {**manifest, "metadata": metadata}


async def write_costs(api: Api, llmd: LLMDeployment, observed: Observed, costs: Mapping[str, int | None]) -> None:
    """Write or take away pod-deletion-cost; a pod that is gone needs none. Raises ApiError."""
    for pod in observed.pods:
        if pod.name not in costs:
            continue
        cost = costs[pod.name]
        annotations = {names.POD_DELETION_COST: None if cost is None else str(cost)}
        body = {"metadata": {**_precondition(pod.uid, pod.resource_version), "annotations": annotations}}
        try:
            await api.patch(PODS, llmd.key.namespace, pod.name, body)
        except ApiError as error:
            if error.status != 404:
                raise


async def write_scale(api: Api, llmd: LLMDeployment, body: Mapping[str, Any], replicas: int) -> dict[str, Any]:
    """Set spec.replicas through the scale subresource; returns `body` as it is afterwards. Raises ApiError."""
    patch = {"metadata": _precondition(llmd.uid, llmd.resource_version), "spec": {"replicas": replicas}}
    answer = await api.patch(LLMDEPLOYMENTS, llmd.key.namespace, llmd.key.name, patch, subresource="scale")
    # The precondition held, so nothing else changed between what we saw and this write.
    written = {"resourceVersion": answer["metadata"]["resourceVersion"], "generation": llmd.generation + 1}
    return {
        **body,
        "metadata": {**body["metadata"], **written},
        "spec": {**body["spec"], "replicas": replicas},
    }


async def write_status(api: Api, body: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `patch` into the status of the object seen as `body`; returns the object. Raises ApiError."""
    metadata = body["metadata"]
    precondition = _precondition(metadata["uid"], metadata["resourceVersion"])
    return await api.patch(
        LLMDEPLOYMENTS,
        metadata["namespace"],
        metadata["name"],
        {"metadata": precondition, "status": dict(patch)},
        subresource="status",
    )


def _precondition(uid: str, resource_version: str) -> dict[str, str]:
    return {"uid": uid, "resourceVersion": resource_version}
