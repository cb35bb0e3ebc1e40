"""Checks that need more than the object itself: quotas."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.errors import ApiError
from pagefleet_localcluster.api.resources import Resource
from pagefleet_localcluster.objects import parse_quantity, quota_usage

Json = dict[str, Any]


def admit_create(cluster: Cluster, resource: Resource, obj: Json) -> None:
    """Raises ApiError 403 when a ResourceQuota of the namespace forbids a new pod."""
    if resource.collection != ("", "pods"):
        return
    namespace = obj["metadata"]["namespace"]
    quotas = cluster.store.all(("", "resourcequotas"), namespace)
    if not quotas:
        return
    wanted = quota_usage([obj])
    used = quota_usage(stored.obj for stored in cluster.store.all(("", "pods"), namespace))
    for quota in quotas:
        hard = {name: parse_quantity(value) for name, value in (quota.obj["spec"].get("hard") or {}).items()}
        over = [name for name in sorted(hard) if name in wanted and used[name] + wanted[name] > hard[name]]
        if over:
            pod_name = obj["metadata"]["name"]
            text = f'pods "{pod_name}" is forbidden: exceeded quota: {quota.obj["metadata"]["name"]}, '
            text += f"requested: {_list(over, wanted)}, used: {_list(over, used)}, limited: {_list(over, hard)}"
            raise ApiError(403, "Forbidden", text, details={"name": pod_name, "kind": "pods"})


def _list(names: list[str], amounts: Mapping[str, Decimal]) -> str:
    return ",".join(f"{name}={amounts[name].normalize():f}" for name in names)
