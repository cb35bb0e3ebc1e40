"""Whether a rollout failed, and what to go back to. Pure.

Each pod template carries the hash of what we wanted it to be, so a ReplicaSet says by itself which wish it belongs to,
also after a restart of the operator.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagefleet_operator import names
from pagefleet_operator.builders import Manifest
from pagefleet_operator.drift import digest
from pagefleet_operator.pods import Pod

FAILED_RESTARTS = 3
"""A new replica that crashed so often will not come up by waiting."""

REVISION = "deployment.kubernetes.io/revision"
POD_TEMPLATE_HASH = "pod-template-hash"

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """A template that is not tried again until the spec changes."""

    template_hash: str
    message: str


def template_hash(deployment: Manifest) -> str:
    """Ten digits that stand for a wanted pod template."""
    return digest(deployment["spec"]["template"])[:10]


def stamped(deployment: Manifest, wanted: str) -> Manifest:
    """The Deployment whose pod template says which wish it is: `wanted` is its template_hash."""
    template = deployment["spec"]["template"]
    annotations = {**template["metadata"].get("annotations", {}), names.TEMPLATE_HASH: wanted}
    template = {**template, "metadata": {**template["metadata"], "annotations": annotations}}
    return {**deployment, "spec": {**deployment["spec"], "template": template}}


@dataclass(frozen=True, slots=True)
class Past:
    """What is remembered of earlier rollouts."""

    failure: Failure | None = None
    """The last one that failed."""
    available: str | None = None
    """Template hash of the last one whose replicas were all ready: a rollout may take the only one of them away."""


def available(past: Past, deployment: Body | None, replica_sets: Sequence[Body]) -> str | None:
    """`past.available` as it is now: the Deployment's own template once all its replicas are ready with it."""
    spec = (deployment or {}).get("spec") or {}
    stamp = _stamp(spec.get("template"))
    own = [item for item in replica_sets if stamp is not None and _stamp(item.get("spec", {}).get("template")) == stamp]
    if any(_is_fully_available(item) and item["spec"]["replicas"] >= spec.get("replicas", 1) for item in own):
        return stamp
    return past.available


def judge(
    wanted: str, past: Past, deployment: Body | None, replica_sets: Sequence[Body], pods: Sequence[Pod]
) -> Failure | None:
    """The failure of the wanted template, known or new; None when it did not fail, or nothing worked before it."""
    good, known = go_back_to(wanted, past, replica_sets), past.failure
    if known is not None and known.template_hash == wanted and good is not None:
        return known
    if deployment is None or _stamp(deployment.get("spec", {}).get("template")) != wanted:
        return None
    if good is None or not _worked(good, past):
        return None
    crashed = _crashed(wanted, replica_sets, pods)
    if crashed is not None:
        return Failure(wanted, crashed)
    for condition in (deployment.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded":
            return Failure(wanted, "no new replica became ready within startup.timeoutSeconds")
    return None


def go_back_to(wanted: str, past: Past, replica_sets: Sequence[Body]) -> Body | None:
    """The newest ReplicaSet of another template; one that worked before any other."""
    others = [item for item in replica_sets if _stamp(item.get("spec", {}).get("template")) != wanted]
    return max(others, key=lambda item: (_worked(item, past), _revision(item)), default=None)


def _worked(replica_set: Body, past: Past) -> bool:
    remembered = past.available is not None and _stamp(replica_set.get("spec", {}).get("template")) == past.available
    return remembered or _is_fully_available(replica_set)


def rolled_back(deployment: Manifest, good: Body) -> Manifest:
    """The Deployment with the template of a ReplicaSet: its controller finds that ReplicaSet again."""
    template = copy.deepcopy(good["spec"]["template"])
    template["metadata"].get("labels", {}).pop(POD_TEMPLATE_HASH, None)
    template["metadata"].pop("creationTimestamp", None)
    return {**deployment, "spec": {**deployment["spec"], "template": template}}


def _crashed(wanted: str, replica_sets: Sequence[Body], pods: Sequence[Pod]) -> str | None:
    ours = {
        (item["metadata"].get("labels") or {}).get(POD_TEMPLATE_HASH)
        for item in replica_sets
        if _stamp(item.get("spec", {}).get("template")) == wanted
    }
    for pod in pods:
        is_new = pod.template_hash is not None and pod.template_hash in ours
        if is_new and not pod.ready and pod.restarts >= FAILED_RESTARTS and pod.trouble is not None:
            return f"pod {pod.name} restarted {pod.restarts} times: {pod.trouble.message}"
    return None


def _is_fully_available(replica_set: Body) -> bool:
    wanted = replica_set.get("spec", {}).get("replicas") or 0
    return wanted > 0 and ((replica_set.get("status") or {}).get("readyReplicas") or 0) >= wanted


def _revision(replica_set: Body) -> int:
    text = (replica_set["metadata"].get("annotations") or {}).get(REVISION, "0")
    return int(text) if str(text).isdigit() else 0


def _stamp(template: Body | None) -> str | None:
    annotations = ((template or {}).get("metadata") or {}).get("annotations") or {}
    stamp = annotations.get(names.TEMPLATE_HASH)
    return None if stamp is None else str(stamp)
