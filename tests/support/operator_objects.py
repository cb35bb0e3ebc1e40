"""Builders of the operator's inputs with keyword defaults."""

from collections.abc import Mapping
from typing import Any

from pagefleet_operator.fleet import Fleet, FleetPod, PodState, Sample
from pagefleet_operator.model import AutoscalingSpec, LLMDeployment
from pagefleet_operator.names import labels
from pagefleet_operator.parsing import parse


def llmd_body(
    name: str = "chat",
    *,
    spec: Mapping[str, Any] | None = None,
    uid: str = "uid-1",
    generation: int = 1,
    status: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "apiVersion": "pagefleet.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid,
            "generation": generation,
            "resourceVersion": "1",
        },
        "spec": {"model": {"source": "file:///models/tiny.gguf"}, **(spec or {})},
        **({"status": dict(status)} if status else {}),
    }


def llmd(name: str = "chat", **fields: Any) -> LLMDeployment:
    return parse(llmd_body(name, **fields))


def sample(
    *,
    used: int = 0,
    cached: int = 0,
    total: int = 100,
    waiting_blocks: int = 0,
    running: int = 0,
    waiting: int = 0,
    oldest: float = 0.0,
    time: float = 0.0,
) -> Sample:
    return Sample(
        time=time,
        blocks_used=used,
        blocks_cached=cached,
        blocks_total=total,
        blocks_waiting=waiting_blocks,
        running=running,
        waiting=waiting,
        oldest_waiting_seconds=oldest,
    )


def fleet(replicas: int, *samples: Sample | None, starting: int = 0) -> Fleet:
    """One ready pod per sample (None: it does not answer), and `starting` further ones."""
    ready = [
        FleetPod(f"pod-{index}", PodState.READY if item else PodState.UNREACHABLE, item)
        for index, item in enumerate(samples)
    ]
    young = [FleetPod(f"new-{index}", PodState.STARTING) for index in range(starting)]
    return Fleet(replicas=replicas, pods=(*ready, *young))


def autoscaling(*, minimum: int = 1, maximum: int = 10, **fields: Any) -> AutoscalingSpec:
    """A target of 80 %, so that a replica of 100 blocks carries 80."""
    return AutoscalingSpec(max_replicas=maximum, min_replicas=minimum, **{"kv_block_occupancy_percent": 80, **fields})


def pod_body(
    name: str,
    *,
    owner: str = "chat",
    ready: bool = True,
    ip: str | None = "127.0.0.9",
    deleting: bool = False,
    cost: str | None = None,
    created: str = "2026-01-01T00:00:00Z",
    waiting: tuple[str, str] | None = None,
    last_exit: tuple[int, str] | None = None,
    unschedulable: str | None = None,
    resource_version: str = "1",
    template_hash: str | None = None,
    restarts: int = 0,
) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "server",
        "image": "img",
        "ready": ready,
        "restartCount": restarts,
        "state": {},
    }
    if ready:
        container["state"] = {"running": {}}
    if waiting is not None:
        container["state"] = {"waiting": {"reason": waiting[0], "message": waiting[1]}}
    if last_exit is not None:
        container["lastState"] = {"terminated": {"exitCode": last_exit[0], "message": last_exit[1], "reason": "Error"}}
    conditions: list[dict[str, Any]] = [{"type": "Ready", "status": "True" if ready else "False"}]
    if unschedulable is not None:
        conditions.append(
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": unschedulable}
        )
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "resourceVersion": resource_version,
            "creationTimestamp": created,
            "labels": {**labels(owner), **({"pod-template-hash": template_hash} if template_hash else {})},
            "annotations": {"controller.kubernetes.io/pod-deletion-cost": cost} if cost is not None else {},
            "ownerReferences": [_controller("ReplicaSet", f"{owner}-1")],
            **({"deletionTimestamp": created} if deleting else {}),
        },
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": conditions,
            "containerStatuses": [] if unschedulable else [container],
        },
    }


def replica_set_body(owner: str = "chat", *, name: str | None = None, deployment: str | None = None) -> dict[str, Any]:
    """The ReplicaSet of the pods of `pod_body`; `deployment`: whose it is, by default of the child of `owner`."""
    name = name or f"{owner}-1"
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "resourceVersion": "1",
            "labels": labels(owner),
            "ownerReferences": [_controller("Deployment", deployment or owner)],
        },
    }


def _controller(kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": "apps/v1", "kind": kind, "name": name, "uid": f"uid-{name}", "controller": True}


def metrics_text(**values: float) -> str:
    """What a server answers; keyword names are the short ones of `sample`."""
    numbers = {"used": 0, "cached": 0, "total": 100, "waiting_blocks": 0, "running": 0, "waiting": 0, "oldest": 0}
    numbers.update(values)  # type: ignore[arg-type]
    free = numbers["total"] - numbers["used"] - numbers["cached"]
    label = 'model_name="chat",engine="0"'
    return "\n".join(
        [
            "# TYPE pagefleet_kv_blocks gauge",
            f'pagefleet_kv_blocks{{state="free"}} {free}',
            f'pagefleet_kv_blocks{{state="cached"}} {numbers["cached"]}',
            f'pagefleet_kv_blocks{{state="used"}} {numbers["used"]}',
            "# TYPE pagefleet_kv_blocks_total gauge",
            f"pagefleet_kv_blocks_total {numbers['total']}",
            "# TYPE pagefleet_kv_blocks_waiting gauge",
            f"pagefleet_kv_blocks_waiting {numbers['waiting_blocks']}",
            "# TYPE pagefleet_requests_oldest_waiting_seconds gauge",
            f"pagefleet_requests_oldest_waiting_seconds {numbers['oldest']}",
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{{{label}}} {numbers['running']}",
            "# TYPE vllm:num_requests_waiting gauge",
            f"vllm:num_requests_waiting{{{label}}} {numbers['waiting']}",
            "",
        ]
    )
