"""A pod's status from the states of its containers. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_localcluster.node.container_state import ContainerState
from pagefleet_localcluster.objects import Object, condition_of, format_time

_OWNED = ("PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready")


@dataclass(frozen=True)
class PodView:
    """What the node knows about a pod."""

    phase: str
    """Pending, Running, Succeeded or Failed."""
    address: str
    """Empty until the pod is set up."""
    host_address: str
    init: Sequence[ContainerState]
    sidecars: frozenset[str]
    """Names of the init containers with `restartPolicy: Always`."""
    containers: Sequence[ContainerState]
    reason: str = ""
    message: str = ""


def pod_status(pod: Object, view: PodView, now: float) -> Object:
    """The whole wanted `status`. What others own (PodScheduled, readiness gates, qosClass) is kept."""
    before = pod.get("status") or {}
    finished = view.phase in ("Succeeded", "Failed")
    generation = pod["metadata"].get("generation", 1)
    incomplete = [state.name for state in view.init if not _is_initialized(state, view)]
    watched = [*(state for state in view.init if state.name in view.sidecars), *view.containers]
    unready = [state.name for state in watched if not state.ready]
    containers = {"status": "True"}
    if view.phase == "Succeeded":
        containers = {"status": "False", "reason": "PodCompleted"}
    elif view.phase == "Failed":
        containers = {"status": "False", "reason": "PodFailed"}
    elif unready:
        message = f"containers with unready status: [{' '.join(unready)}]"
        containers = {"status": "False", "reason": "ContainersNotReady", "message": message}
    initialized = {"status": "True"}
    if view.phase == "Succeeded":
        initialized["reason"] = "PodCompleted"
    elif incomplete:
        message = f"containers with incomplete status: [{' '.join(incomplete)}]"
        initialized = {"status": "False", "reason": "ContainersNotInitialized", "message": message}
    wanted = {
        "PodReadyToStartContainers": {"status": "True" if view.address and not finished else "False"},
        "Initialized": initialized,
        "ContainersReady": containers,
        "Ready": _gated(pod, containers),
    }
    conditions = [_condition(kind, wanted[kind], condition_of(pod, kind), generation, now) for kind in _OWNED]
    conditions += [condition for condition in before.get("conditions") or () if condition["type"] not in _OWNED]
    return {
        **{key: value for key, value in before.items() if key not in ("reason", "message")},
        "observedGeneration": generation,
        "phase": view.phase,
        "conditions": conditions,
        "hostIP": view.host_address,
        "hostIPs": [{"ip": view.host_address}],
        **({"podIP": view.address, "podIPs": [{"ip": view.address}]} if view.address else {}),
        "startTime": before.get("startTime") or format_time(now),
        **({"initContainerStatuses": [state.status() for state in view.init]} if view.init else {}),
        "containerStatuses": [state.status() for state in view.containers],
        **({"reason": view.reason} if view.reason else {}),
        **({"message": view.message} if view.message else {}),
    }


def _is_initialized(state: ContainerState, view: PodView) -> bool:
    if state.name in view.sidecars:
        return state.started or view.phase != "Pending"
    return state.exit_code == 0


def _gated(pod: Object, containers: Object) -> Object:
    if containers["status"] != "True":
        return containers
    for gate in pod["spec"].get("readinessGates") or ():
        kind = gate["conditionType"]
        condition = condition_of(pod, kind)
        if condition is None:
            message = f'corresponding condition of pod readiness gate "{kind}" does not exist.'
        elif condition["status"] != "True":
            message = f'the status of pod readiness gate "{kind}" is not "True", but {condition["status"]}'
        else:
            continue
        return {"status": "False", "reason": "ReadinessGatesNotReady", "message": message}
    return {"status": "True"}


def _condition(kind: str, wanted: Object, before: Object | None, generation: int, now: float) -> Object:
    same = before is not None and before["status"] == wanted["status"]
    return {
        "type": kind,
        "observedGeneration": generation,
        "lastProbeTime": None,
        "lastTransitionTime": before["lastTransitionTime"] if before is not None and same else format_time(now),
        **wanted,
    }
