"""The cells of a pod's row, after kubectl's printPod."""

from collections.abc import Callable
from typing import Any

Json = dict[str, Any]


def _statuses(pod: Json, field: str) -> list[Json]:
    return list(pod.get("status", {}).get(field) or ())


def _sidecars(pod: Json) -> set[str]:
    return {c["name"] for c in pod["spec"].get("initContainers") or () if c.get("restartPolicy") == "Always"}


def ready(pod: Json, _now: float) -> str:
    """`1/2`: ready containers of all that run for good, native sidecars included."""
    sidecars = _sidecars(pod)
    total = len(pod["spec"].get("containers") or ()) + len(sidecars)
    running = [s for s in _statuses(pod, "containerStatuses") if s.get("ready") and "running" in (s.get("state") or {})]
    running += [s for s in _statuses(pod, "initContainerStatuses") if s["name"] in sidecars and s.get("ready")]
    return f"{len(running)}/{total}"


def _ended(state: Json, default: str = "") -> str:
    ended = state.get("terminated") or {}
    if ended.get("reason"):
        return str(ended["reason"])
    if not ended:
        return default
    return f"Signal:{ended['signal']}" if ended.get("signal") else f"ExitCode:{ended.get('exitCode', 0)}"


def _init_status(pod: Json) -> str | None:
    """`Init:1/2` and the like while init containers hold the pod up."""
    sidecars = _sidecars(pod)
    total = len(pod["spec"].get("initContainers") or ())
    for index, status in enumerate(_statuses(pod, "initContainerStatuses")):
        state = status.get("state") or {}
        ended = state.get("terminated")
        if ended and ended.get("exitCode") == 0:
            continue
        if status["name"] in sidecars and status.get("started"):
            continue
        if ended:
            return f"Init:{_ended(state)}"
        waiting = (state.get("waiting") or {}).get("reason")
        if waiting and waiting != "PodInitializing":
            return f"Init:{waiting}"
        return f"Init:{index}/{total}"
    return None


def status(pod: Json, _now: float) -> str:
    """Phase or the reason that says more: `CrashLoopBackOff`, `Completed`, `Terminating`."""
    found = pod.get("status", {})
    text = str(found.get("reason") or found.get("phase") or "")
    for condition in found.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "SchedulingGated":
            text = "SchedulingGated"
    starting = _init_status(pod)
    if starting:
        text = starting
    else:
        running = False
        for container in reversed(_statuses(pod, "containerStatuses")):
            state = container.get("state") or {}
            waiting = (state.get("waiting") or {}).get("reason")
            running |= bool(container.get("ready")) and "running" in state
            text = waiting or _ended(state, text)
        if text == "Completed" and running:
            conditions = found.get("conditions") or ()
            is_ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
            text = "Running" if is_ready else "NotReady"
    if pod["metadata"].get("deletionTimestamp"):
        return "Unknown" if found.get("reason") == "NodeLost" else "Terminating"
    return text


def restarts(pod: Json, age: Callable[[str], str]) -> str:
    """`3 (10s ago)`: restarts of all containers and the age of the last."""
    statuses = _statuses(pod, "containerStatuses")
    statuses += [s for s in _statuses(pod, "initContainerStatuses") if s["name"] in _sidecars(pod)]
    count = sum(item.get("restartCount", 0) for item in statuses)
    times = [((s.get("lastState") or {}).get("terminated") or {}).get("finishedAt") for s in statuses]
    last = max((at for at in times if at), default=None)
    return f"{count} ({age(last)} ago)" if count and last else str(count)


def readiness_gates(pod: Json, _now: float) -> str:
    """`1/2`: fulfilled readiness gates."""
    gates = pod["spec"].get("readinessGates") or ()
    if not gates:
        return "<none>"
    held = {c["type"] for c in pod.get("status", {}).get("conditions") or () if c.get("status") == "True"}
    return f"{sum(gate.get('conditionType') in held for gate in gates)}/{len(gates)}"
