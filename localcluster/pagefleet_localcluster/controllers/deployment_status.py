"""A Deployment's status: counts and the conditions Available, Progressing and ReplicaFailure.

Pure. Reasons, messages and transitions are those of Kubernetes' deployment controller (progress.go)."""

from collections.abc import Sequence

from pagefleet_localcluster.controllers.replica_arithmetic import available_of, fence_posts, size_of
from pagefleet_localcluster.objects import Object, condition_of, format_time, name_of, parse_time

NO_DEADLINE = 2**31 - 1
"""The value of `progressDeadlineSeconds` that means "never"."""


def set_condition(
    conditions: list[Object], kind: str, status: str, reason: str, message: str, now: float, *, refresh: bool = False
) -> None:
    """Set one condition in place. The same status and reason changes nothing, unless `refresh` renews its update time;
    `lastTransitionTime` moves only with the status."""
    old = next((c for c in conditions if c["type"] == kind), None)
    if old is not None and old["status"] == status and old.get("reason") == reason and not refresh:
        return
    same = old is not None and old["status"] == status
    moment = format_time(now)
    conditions[:] = [c for c in conditions if c["type"] != kind]
    conditions.append(
        {
            "type": kind,
            "status": status,
            "lastUpdateTime": moment,
            "lastTransitionTime": old["lastTransitionTime"] if old is not None and same else moment,
            "reason": reason,
            "message": message,
        }
    )


def deadline_of(deployment: Object) -> int | None:
    """`progressDeadlineSeconds`, None when there is none."""
    seconds = int(deployment["spec"].get("progressDeadlineSeconds", 600))
    return None if seconds == NO_DEADLINE else seconds


def is_complete(deployment: Object, status: Object) -> bool:
    """Whether every wanted replica is updated and available and no other is left."""
    wanted = size_of(deployment)
    counts = [int(status.get(key, 0)) for key in ("updatedReplicas", "replicas", "availableReplicas")]
    return counts == [wanted] * 3 and status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)


def status_of(deployment: Object, new: Object | None, old: Sequence[Object], now: float) -> Object:
    """Counts and the Available condition; the other conditions as they are."""
    every = [*old, *([new] if new is not None else [])]

    def total(key: str, sets: Sequence[Object] = every) -> int:
        return sum(int((rs.get("status") or {}).get(key, 0)) for rs in sets)

    before = deployment.get("status") or {}
    available = sum(map(available_of, every))
    replicas = total("replicas")
    conditions = [dict(condition) for condition in before.get("conditions") or ()]
    if available >= size_of(deployment) - fence_posts(deployment)[1]:
        reason, message, value = "MinimumReplicasAvailable", "Deployment has minimum availability.", "True"
    else:
        reason, message = "MinimumReplicasUnavailable", "Deployment does not have minimum availability."
        value = "False"
    set_condition(conditions, "Available", value, reason, message, now)
    counts = {
        "replicas": replicas,
        "updatedReplicas": total("replicas", [new] if new is not None else []),
        "readyReplicas": total("readyReplicas"),
        "availableReplicas": available,
        "unavailableReplicas": max(0, replicas - available),
    }
    return {
        "observedGeneration": deployment["metadata"].get("generation", 0),
        **{key: count for key, count in counts.items() if count},
        "terminatingReplicas": total("terminatingReplicas"),
        **({"collisionCount": before["collisionCount"]} if before.get("collisionCount") else {}),
        "conditions": conditions,
    }


def judge_progress(deployment: Object, new: Object | None, old: Sequence[Object], status: Object, now: float) -> None:
    """Bring Progressing and ReplicaFailure in `status` up to date (in place)."""
    conditions: list[Object] = status["conditions"]
    before = deployment.get("status") or {}
    current = condition_of(deployment, "Progressing")
    deadline = deadline_of(deployment)
    subject = f'ReplicaSet "{name_of(new)}"' if new is not None else f'Deployment "{name_of(deployment)}"'
    if deadline is None:
        conditions[:] = [c for c in conditions if c["type"] != "Progressing"]
    elif not (
        status.get("replicas", 0) == status.get("updatedReplicas", 0)
        and current is not None
        and current["reason"] == "NewReplicaSetAvailable"
    ):
        if is_complete(deployment, status):
            message = f"{subject} has successfully progressed."
            set_condition(conditions, "Progressing", "True", "NewReplicaSetAvailable", message, now)
        elif _has_progressed(before, status):
            message = f"{subject} is progressing."
            set_condition(conditions, "Progressing", "True", "ReplicaSetUpdated", message, now, refresh=True)
        elif _has_timed_out(deployment, now):
            message = f"{subject} has timed out progressing."
            set_condition(conditions, "Progressing", "False", "ProgressDeadlineExceeded", message, now)
    failure = next(
        (c for rs in [*([new] if new is not None else []), *old] if (c := condition_of(rs, "ReplicaFailure"))), None
    )
    if failure is not None:
        set_condition(conditions, "ReplicaFailure", failure["status"], failure["reason"], failure["message"], now)
    else:
        conditions[:] = [c for c in conditions if c["type"] != "ReplicaFailure"]


def seconds_to_deadline(deployment: Object, status: Object, now: float) -> float | None:
    """When to look again whether the rollout timed out; None when nothing is pending."""
    deadline = deadline_of(deployment)
    current = next((c for c in status["conditions"] if c["type"] == "Progressing"), None)
    if deadline is None or current is None or is_complete(deployment, status):
        return None
    if current["reason"] in ("NewReplicaSetAvailable", "ProgressDeadlineExceeded"):
        return None
    return max(0.0, parse_time(current["lastUpdateTime"]) + deadline - now) + 1.0


def _has_progressed(before: Object, status: Object) -> bool:
    def old_replicas(counts: Object) -> int:
        return int(counts.get("replicas", 0)) - int(counts.get("updatedReplicas", 0))

    grown = any(
        status.get(key, 0) > before.get(key, 0) for key in ("updatedReplicas", "readyReplicas", "availableReplicas")
    )
    return grown or old_replicas(status) < old_replicas(before)


def _has_timed_out(deployment: Object, now: float) -> bool:
    condition, deadline = condition_of(deployment, "Progressing"), deadline_of(deployment)
    if condition is None or deadline is None or condition["reason"] == "NewReplicaSetAvailable":
        return False
    if condition["reason"] == "ProgressDeadlineExceeded":
        return True
    return parse_time(condition["lastUpdateTime"]) + deadline < now
