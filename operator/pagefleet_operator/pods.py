"""Pods as the API shows them, reduced to what the operator needs. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagefleet_operator import names
from pagefleet_operator.errors import shorten
from pagefleet_operator.fleet import PodState
from pagefleet_operator.times import parse_timestamp

CRASH_REASONS = frozenset({"CrashLoopBackOff", "Error", "OOMKilled", "ContainerCannotRun"})
IMAGE_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


BAD_MODEL_EXIT_CODE = 3
"""How a server ends whose model is not there or cannot be served: starting it again does not help."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a pod does not serve."""

    reason: str
    """ImagePullFailed, OutOfMemory, ModelUnusable, CrashLoop, ContainerConfigError or Unschedulable."""
    message: str


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of ours."""

    name: str
    uid: str
    resource_version: str
    """Precondition of writes."""
    ip: str | None
    ready: bool
    terminating: bool
    finished: bool
    """Phase Succeeded or Failed: it will never serve again."""
    created: str
    """creationTimestamp, RFC 3339."""
    template_hash: str | None
    deletion_cost: int | None
    restarts: int
    """Of the server's container."""
    trouble: Trouble | None
    start_seconds: float | None
    """From its creation to ready, by the API's times; None while it is not."""

    @property
    def state(self) -> PodState:
        """What it does, metrics apart."""
        if self.terminating:
            return PodState.DRAINING
        if self.ready:
            return PodState.READY
        if self.trouble is None:
            return PodState.CRASHED if self.finished else PodState.STARTING
        return PodState.UNSCHEDULABLE if self.trouble.reason == "Unschedulable" else PodState.CRASHED


def is_finished(body: Mapping[str, Any]) -> bool:
    """Phase Succeeded or Failed: the pod will never serve again."""
    return (body.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def parse_pod(body: Mapping[str, Any]) -> Pod:
    """An API object -> Pod."""
    metadata, status = body["metadata"], body.get("status") or {}
    conditions = {item["type"]: item for item in status.get("conditions") or []}
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata.get("resourceVersion", ""),
        ip=status.get("podIP") or None,
        ready=conditions.get("Ready", {}).get("status") == "True",
        terminating=metadata.get("deletionTimestamp") is not None,
        finished=is_finished(body),
        created=metadata.get("creationTimestamp", ""),
        template_hash=(metadata.get("labels") or {}).get("pod-template-hash"),
        deletion_cost=_cost((metadata.get("annotations") or {}).get(names.POD_DELETION_COST)),
        restarts=sum(item.get("restartCount") or 0 for item in _container_statuses(status)),
        trouble=_trouble(status, conditions),
        start_seconds=_start_seconds(metadata, conditions.get("Ready", {})),
    )


def _start_seconds(metadata: Mapping[str, Any], ready: Mapping[str, Any]) -> float | None:
    if ready.get("status") != "True":
        return None
    try:
        created, since = (
            parse_timestamp(text) for text in (metadata["creationTimestamp"], ready["lastTransitionTime"])
        )
    except (KeyError, ValueError, AttributeError):
        return None
    return max(0.0, since - created)


def _cost(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _trouble(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> Trouble | None:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return Trouble("Unschedulable", shorten(scheduled.get("message") or "no node has room for the pod"))
    for container in _container_statuses(status):
        trouble = _container_trouble(container)
        if trouble is not None and container.get("name") != names.CONTAINER:
            return Trouble(trouble.reason, f"container {container.get('name')}: {trouble.message}")
        if trouble is not None:
            return trouble
    return None


def _container_statuses(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of all containers that run for long: sidecars first."""
    return [
        *(item for item in status.get("initContainerStatuses") or [] if item.get("name") == names.CONTAINER),
        *(status.get("containerStatuses") or []),
    ]


def _container_trouble(container: Mapping[str, Any]) -> Trouble | None:
    state = container.get("state") or {}
    waiting = state.get("waiting") or {}
    reason, message = waiting.get("reason", ""), shorten(waiting.get("message") or "")
    if reason in IMAGE_REASONS:
        return Trouble("ImagePullFailed", message or f"image {container.get('image', '')} cannot be pulled")
    if reason in CONFIG_REASONS:
        return Trouble("ContainerConfigError", message or reason)
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated")
    if ended is None:
        return Trouble("CrashLoop", message or reason) if reason in CRASH_REASONS else None
    if container.get("ready") and "running" in state:
        return None
    if ended.get("exitCode") == 0 and reason not in CRASH_REASONS:
        return None
    code = ended.get("exitCode")
    what = shorten(ended.get("message") or "") or f"{ended.get('reason') or 'Error'}, no message"
    if ended.get("reason") == "OOMKilled":
        return Trouble("OutOfMemory", "the container was killed for using more memory than its limit: raise resources")
    if code == BAD_MODEL_EXIT_CODE and container.get("name") == names.CONTAINER:
        return Trouble("ModelUnusable", f"{what}: correct spec.model, or what lies at its source")
    return Trouble("CrashLoop", f"exit code {code}: {what}")
