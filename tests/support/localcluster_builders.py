"""Kubernetes objects with defaults for the local cluster's tests."""

from typing import Any

from pagefleet_localcluster.objects import Object, format_time


def deployment(
    *,
    replicas: int = 3,
    max_surge: int | str = 1,
    max_unavailable: int | str = 0,
    strategy: str = "RollingUpdate",
    image: str = "img:1",
    status: Object | None = None,
    generation: int = 1,
    **spec: Any,
) -> Object:
    rolling = {"maxSurge": max_surge, "maxUnavailable": max_unavailable}
    return {
        "metadata": {"name": "web", "namespace": "default", "uid": "uid-web", "generation": generation},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": "web"}},
            "strategy": {"type": strategy, **({"rollingUpdate": rolling} if strategy == "RollingUpdate" else {})},
            "template": template(image),
            **spec,
        },
        "status": status or {},
    }


def template(image: str) -> Object:
    return {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"name": "server", "image": image}]}}


def replica_set(
    name: str,
    *,
    size: int,
    available: int | None = None,
    image: str = "img:1",
    revision: int = 1,
    created: int = 0,
    desired: int | None = None,
    maximum: int | None = None,
) -> Object:
    annotations = {"deployment.kubernetes.io/revision": str(revision)}
    if desired is not None:
        annotations["deployment.kubernetes.io/desired-replicas"] = str(desired)
    if maximum is not None:
        annotations["deployment.kubernetes.io/max-replicas"] = str(maximum)
    ready = size if available is None else available
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "generation": 1,
            "creationTimestamp": format_time(created),
            "annotations": annotations,
        },
        "spec": {"replicas": size, "template": template(image)},
        "status": {
            "replicas": size,
            "readyReplicas": ready,
            "availableReplicas": ready,
            "observedGeneration": 1,
        },
    }


def pod(
    name: str = "p",
    *,
    node: str | None = "n0",
    phase: str = "Running",
    ready: bool = True,
    ready_since: int = 0,
    created: int = 0,
    cost: int | str | None = None,
    restarts: int = 0,
    deleted: bool = False,
    address: str = "127.64.0.1",
    labels: dict[str, str] | None = None,
    requests: dict[str, str] | None = None,
    limits: dict[str, str] | None = None,
    ports: dict[str, int] | None = None,
    owner: str | None = None,
    **spec: Any,
) -> Object:
    container: Object = {"name": "server", "image": "img:1"}
    if requests or limits:
        container["resources"] = {"requests": requests or {}, "limits": limits or {}}
    if ports:
        container["ports"] = [{"name": key, "containerPort": value} for key, value in ports.items()]
    metadata: Object = {
        "name": name,
        "namespace": "default",
        "uid": f"uid-{name}",
        "creationTimestamp": format_time(created),
        "labels": {"app": "web"} if labels is None else labels,
    }
    if cost is not None:
        metadata["annotations"] = {"controller.kubernetes.io/pod-deletion-cost": str(cost)}
    if deleted:
        metadata["deletionTimestamp"] = format_time(0)
    if owner is not None:
        metadata["ownerReferences"] = [{"kind": "ReplicaSet", "name": owner, "uid": owner, "controller": True}]
    return {
        "metadata": metadata,
        "spec": {"containers": [container], **({"nodeName": node} if node else {}), **spec},
        "status": {
            "phase": phase,
            "podIP": address,
            "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": format_time(ready_since)}],
            "containerStatuses": [{"name": "server", "restartCount": restarts}],
        },
    }


def node(
    name: str = "n0",
    *,
    gpus: int = 0,
    cpus: int = 4,
    ready: bool = True,
    labels: dict[str, str] | None = None,
    taints: list[Object] | None = None,
    unschedulable: bool = False,
) -> Object:
    allocatable = {"cpu": str(cpus), "memory": "8Gi", "pods": "110"}
    if gpus:
        allocatable["nvidia.com/gpu"] = str(gpus)
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"taints": taints or [], **({"unschedulable": True} if unschedulable else {})},
        "status": {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def service(*, port: int = 80, target: int | str | None = None, **spec: Any) -> Object:
    entry: Object = {"name": "http", "port": port, "protocol": "TCP"}
    if target is not None:
        entry["targetPort"] = target
    return {
        "metadata": {"name": "web", "namespace": "default", "uid": "uid-service"},
        "spec": {"selector": {"app": "web"}, "ports": [entry], "clusterIP": "127.96.0.10", **spec},
    }
