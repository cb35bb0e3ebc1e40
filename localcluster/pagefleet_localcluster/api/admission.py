"""Checks that need more than the object itself: quotas."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.errors import ApiError
from pagefleet_localcluster.api.quantities import parse_quantity
from pagefleet_localcluster.api.resources import Resource

Json = dict[str, Any]


def admit_create(cluster: Cluster, resource: Resource, obj: Json) -> None:
    """Raises ApiError 403 when a ResourceQuota of the namespace forbids a new pod."""
    if resource.collection != ("", "pods"):
        return
    namespace = obj["metadata"]["namespace"]
    quotas = cluster.store.all(("", "resourcequotas"), namespace)
    if not quotas:
        return
    wanted = usage_of(obj)
    pods = [stored.obj for stored in cluster.store.all(("", "pods"), namespace)]
    used: dict[str, Decimal] = {}
    for pod in pods:
        if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
            for name, amount in usage_of(pod).items():
                used[name] = used.get(name, Decimal(0)) + amount
    for quota in quotas:
        hard = {name: parse_quantity(value) for name, value in (quota.obj["spec"].get("hard") or {}).items()}
        now = {name: used.get(name, Decimal(0)) for name in hard}
        over = [name for name in sorted(hard) if name in wanted and now[name] + wanted[name] > hard[name]]
        if over:
            pod_name = obj["metadata"]["name"]
            text = f'pods "{pod_name}" is forbidden: exceeded quota: {quota.obj["metadata"]["name"]}, '
            text += f"requested: {_list(over, wanted)}, used: {_list(over, now)}, limited: {_list(over, hard)}"
            raise ApiError(403, "Forbidden", text, details={"name": pod_name, "kind": "pods"})


def _list(names: list[str], amounts: dict[str, Decimal]) -> str:
    return ",".join(f"{name}={amounts[name].normalize():f}" for name in names)


def usage_of(pod: Json) -> dict[str, Decimal]:
    """What a pod counts against quotas: `pods`, `requests.X`, `limits.X`, and cpu and memory plain."""
    total = {"pods": Decimal(1)}
    for name, amount in _amounts(pod):
        total[name] = total.get(name, Decimal(0)) + amount
    return total


def _amounts(pod: Json) -> Iterator[tuple[str, Decimal]]:
    for container in pod["spec"].get("containers") or ():
        resources = container.get("resources") or {}
        for kind in ("requests", "limits"):
            for name, quantity in (resources.get(kind) or {}).items():
                yield f"{kind}.{name}", parse_quantity(quantity)
                if kind == "requests" and name in ("cpu", "memory"):
                    yield name, parse_quantity(quantity)
