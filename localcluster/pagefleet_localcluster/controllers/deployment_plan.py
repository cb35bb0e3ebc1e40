"""What a Deployment's controller does next, as a pure function: (deployment, replica sets, running pods, now) -> plan.

The rules are those of Kubernetes' deployment controller; one plan holds what one of its synchronisations would do."""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagefleet_localcluster.controllers.deployment_status import (
    deadline_of,
    is_complete,
    judge_progress,
    seconds_to_deadline,
    set_condition,
    status_of,
)
from pagefleet_localcluster.controllers.replica_arithmetic import (
    DESIRED_ANNOTATION,
    MAX_ANNOTATION,
    fence_posts,
    is_rolling,
    new_size,
    scaled_sizes,
    shrink_old,
    size_of,
)
from pagefleet_localcluster.objects import (
    Object,
    annotations_of,
    condition_of,
    is_deleted,
    labels_of,
    name_of,
    owner_reference,
    safe_hash,
)

HASH_LABEL = "pod-template-hash"
REVISION = "deployment.kubernetes.io/revision"
REVISION_HISTORY = "deployment.kubernetes.io/revision-history"
_NOT_INHERITED = {
    "kubectl.kubernetes.io/last-applied-configuration",
    REVISION,
    REVISION_HISTORY,
    DESIRED_ANNOTATION,
    MAX_ANNOTATION,
}
MAX_REVISION_HISTORY_CHARS = 2000


@dataclass(frozen=True)
class Resize:
    """Set a ReplicaSet's `spec.replicas` and annotations; said in an event when the size changes."""

    name: str
    before: int
    after: int
    annotations: dict[str, str]


@dataclass(frozen=True)
class DeploymentPlan:
    """Effects in the order in which they are carried out."""

    status: Object
    """The wanted `status`."""
    revision: str | None = None
    """The Deployment's own revision annotation; None leaves it."""
    create: Object | None = None
    """A ReplicaSet to create."""
    resize: list[Resize] = field(default_factory=list)
    delete: list[str] = field(default_factory=list)
    """Names of ReplicaSets beyond the revision history limit."""
    requeue_seconds: float | None = None
    """When to plan again even if nothing happens."""


def template_hash(deployment: Object) -> str:
    """The `pod-template-hash` of the current template and collision count."""
    collisions = (deployment.get("status") or {}).get("collisionCount") or 0
    text = json.dumps(deployment["spec"]["template"], sort_keys=True, separators=(",", ":"))
    return safe_hash(f"{text}/{collisions}" if collisions else text)


def find_new(deployment: Object, replica_sets: Sequence[Object]) -> Object | None:
    """The oldest ReplicaSet whose template, without its hash label, equals the Deployment's."""
    wanted = _without_hash(deployment["spec"]["template"])
    same = [rs for rs in replica_sets if _without_hash(rs["spec"]["template"]) == wanted]
    return min(same, key=lambda rs: rs["metadata"].get("creationTimestamp") or "", default=None)


def plan_deployment(deployment: Object, replica_sets: Sequence[Object], old_pods: int, now: float) -> DeploymentPlan:
    """`old_pods`: pods of old ReplicaSets that have not ended (Recreate waits for them). `now` in Unix seconds."""
    new = find_new(deployment, replica_sets)
    old = [rs for rs in replica_sets if rs is not new]
    status = status_of(deployment, new, old, now)
    if is_deleted(deployment):
        return DeploymentPlan(status)
    paused = bool(deployment["spec"].get("paused"))
    _mark_pause(deployment, status, paused, now)
    if paused or _is_scaling(deployment, replica_sets):
        sizes = scaled_sizes(deployment, new, old)
        return DeploymentPlan(
            status,
            revision=annotations_of(new).get(REVISION) if new is not None else None,
            resize=_resizes(deployment, new, old, sizes, revise=False),
            delete=_expired(deployment, old) if paused else [],
        )
    if not is_rolling(deployment):
        sizes = {name_of(rs): 0 for rs in old if size_of(rs)}
        if sizes or (old_pods and new is None) or (old_pods and new is not None and size_of(new) == 0):
            judge_progress(deployment, new, old, status, now)
            return DeploymentPlan(status, resize=_resizes(deployment, new, old, sizes, revise=False))
    if new is None:
        return _introduce(deployment, old, status, now)
    return _roll(deployment, new, old, status, now)


def _introduce(deployment: Object, old: Sequence[Object], status: Object, now: float) -> DeploymentPlan:
    revision = str(_max_revision(old) + 1)
    hash_label = template_hash(deployment)
    template = copy.deepcopy(deployment["spec"]["template"])
    template.setdefault("metadata", {}).setdefault("labels", {})[HASH_LABEL] = hash_label
    selector = copy.deepcopy(deployment["spec"]["selector"])
    selector.setdefault("matchLabels", {})[HASH_LABEL] = hash_label
    metadata = deployment["metadata"]
    body: Object = {
        "metadata": {
            "name": f"{name_of(deployment)}-{hash_label}",
            "namespace": metadata["namespace"],
            "labels": template["metadata"]["labels"],
            "annotations": {**_new_annotations(deployment, None, revision), **_size_annotations(deployment)},
            "ownerReferences": [owner_reference(deployment, "apps/v1", "Deployment")],
        },
        "spec": {
            "replicas": new_size(deployment, None, old),
            **({"minReadySeconds": wait} if (wait := deployment["spec"].get("minReadySeconds", 0)) else {}),
            "selector": selector,
            "template": template,
        },
    }
    if deadline_of(deployment) is not None:
        message = f'Created new replica set "{name_of(body)}"'
        set_condition(status["conditions"], "Progressing", "True", "NewReplicaSetCreated", message, now)
    return DeploymentPlan(
        status, revision=revision, create=body, requeue_seconds=seconds_to_deadline(deployment, status, now)
    )


def _roll(deployment: Object, new: Object, old: Sequence[Object], status: Object, now: float) -> DeploymentPlan:
    if deadline_of(deployment) is not None and condition_of(deployment, "Progressing") is None:
        message = f'Found new replica set "{name_of(new)}"'
        set_condition(status["conditions"], "Progressing", "True", "FoundNewReplicaSet", message, now)
    size = new_size(deployment, new, [new, *old])
    sizes = {name_of(new): size} if size != size_of(new) else shrink_old(deployment, new, old)
    judge_progress(deployment, new, old, status, now)
    resize = _resizes(deployment, new, old, sizes, revise=True)
    return DeploymentPlan(
        status,
        revision=_revision_for(new, old),
        resize=resize,
        delete=_expired(deployment, old) if not sizes and is_complete(deployment, status) else [],
        requeue_seconds=seconds_to_deadline(deployment, status, now),
    )


def _resizes(
    deployment: Object, new: Object | None, old: Sequence[Object], sizes: dict[str, int], *, revise: bool
) -> list[Resize]:
    """Resizes for `sizes`; with `revise`, also what brings the new ReplicaSet's annotations up to date."""
    result = []
    for rs in [*([new] if new is not None else []), *old]:
        annotations: dict[str, str] = {}
        if revise and rs is new:
            annotations |= _new_annotations(deployment, rs, _revision_for(rs, old))
        if name_of(rs) in sizes:
            annotations |= _size_annotations(deployment)
        changed = {key: value for key, value in annotations.items() if annotations_of(rs).get(key) != value}
        size = sizes.get(name_of(rs), size_of(rs))
        if changed or size != size_of(rs):
            result.append(Resize(name_of(rs), size_of(rs), size, changed))
    return result


def _is_scaling(deployment: Object, replica_sets: Sequence[Object]) -> bool:
    """Whether `spec.replicas` differs from what active ReplicaSets were last sized for."""
    wanted = str(size_of(deployment))
    return any(size_of(rs) > 0 and annotations_of(rs).get(DESIRED_ANNOTATION, wanted) != wanted for rs in replica_sets)


def _mark_pause(deployment: Object, status: Object, paused: bool, now: float) -> None:
    if deadline_of(deployment) is None:
        return
    current = condition_of(deployment, "Progressing")
    reason = current["reason"] if current is not None else ""
    conditions = status["conditions"]
    if reason == "ProgressDeadlineExceeded":
        return
    if paused and reason != "DeploymentPaused":
        set_condition(conditions, "Progressing", "Unknown", "DeploymentPaused", "Deployment is paused", now)
    elif not paused and reason == "DeploymentPaused":
        set_condition(conditions, "Progressing", "Unknown", "DeploymentResumed", "Deployment is resumed", now)


def _size_annotations(deployment: Object) -> dict[str, str]:
    wanted = size_of(deployment)
    return {DESIRED_ANNOTATION: str(wanted), MAX_ANNOTATION: str(wanted + fence_posts(deployment)[0])}


def _new_annotations(deployment: Object, new: Object | None, revision: str) -> dict[str, str]:
    inherited = {key: value for key, value in annotations_of(deployment).items() if key not in _NOT_INHERITED}
    result = {**inherited, REVISION: revision}
    if new is not None:
        before = annotations_of(new).get(REVISION)
        if before and before != revision:
            history = annotations_of(new).get(REVISION_HISTORY)
            past = [*(history.split(",") if history else []), before]
            result[REVISION_HISTORY] = ",".join(past)[-MAX_REVISION_HISTORY_CHARS:]
    return result


def _revision_of(replica_set: Object) -> int:
    text = annotations_of(replica_set).get(REVISION, "0")
    return int(text) if text.isdigit() else 0


def _max_revision(replica_sets: Sequence[Object]) -> int:
    return max(map(_revision_of, replica_sets), default=0)


def _revision_for(new: Object, old: Sequence[Object]) -> str:
    return str(max(_revision_of(new), _max_revision(old) + 1))


def _expired(deployment: Object, old: Sequence[Object]) -> list[str]:
    limit = int(deployment["spec"].get("revisionHistoryLimit", 10))
    alive = sorted((rs for rs in old if not is_deleted(rs)), key=_revision_of)
    return [
        name_of(rs)
        for rs in alive[: max(0, len(alive) - limit)]
        if size_of(rs) == 0
        and not (rs.get("status") or {}).get("replicas")
        and rs["metadata"].get("generation", 0) <= (rs.get("status") or {}).get("observedGeneration", 0)
    ]


def _without_hash(template: Object) -> Object:
    metadata = template.get("metadata") or {}
    labels = {key: value for key, value in labels_of({"metadata": metadata}).items() if key != HASH_LABEL}
    return {
        "metadata": {key: value for key, value in {**metadata, "labels": labels}.items() if value},
        "spec": template["spec"],
    }
