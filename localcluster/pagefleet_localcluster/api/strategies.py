"""What single built-in resources add to the common rules: computed defaults, fixed fields, own checks."""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagefleet_localcluster.api import workloads
from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.crds import check_crd, prepare_crd
from pagefleet_localcluster.api.errors import ApiError, Cause
from pagefleet_localcluster.api.resources import Resource

Json = dict[str, Any]
SERVICE_NETWORK = ipaddress.ip_network("127.96.0.0/16")
_FIRST_SERVICE_IP = 10

Prepare = Callable[[Cluster, Json, Json | None], None]
Check = Callable[[Json, Json | None], list[Cause]]


def _nothing(_cluster: Cluster, _obj: Json, _old: Json | None) -> None:
    return None


def _nothing_more(_cluster: Cluster, _obj: Json) -> None:
    return None


def _no_faults(_obj: Json, _old: Json | None) -> list[Cause]:
    return []


@dataclass(frozen=True)
class Strategy:
    """Hooks of one resource; `old` is None on create."""

    prepare: Prepare = _nothing
    """Fills computed fields after the schema's defaults."""
    check: Check = _no_faults
    """Faults that the schema cannot express."""
    has_generation: bool = False
    """Whether `metadata.generation` counts changes of the spec."""
    returns_deleted: bool = False
    """Whether a delete answers with the object instead of a Status."""
    complete: Callable[[Cluster, Json], None] = _nothing_more
    """Fills in, on create, what the API itself allots and so no manager owns."""
    structs: tuple[str, ...] = ("spec", "status")
    """Containers that always exist in the typed object, as dotted paths (see ownership.Writer.structs)."""


def _namespace(_cluster: Cluster, obj: Json, old: Json | None) -> None:
    meta = obj["metadata"]
    meta.setdefault("labels", {})["kubernetes.io/metadata.name"] = meta["name"]
    if old is None:
        obj["status"] = {"phase": "Active"}
    else:
        obj["spec"] = old.get("spec", {})


def _complete_namespace(_cluster: Cluster, obj: Json) -> None:
    obj["spec"].setdefault("finalizers", ["kubernetes"])


def _complete_node(_cluster: Cluster, obj: Json) -> None:
    """No pod comes to a new node before its first report."""
    taint = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
    obj["spec"].setdefault("taints", []).append(taint)


def _service(_cluster: Cluster, obj: Json, old: Json | None) -> None:
    spec = obj["spec"]
    for port in spec.get("ports") or ():
        port.setdefault("targetPort", port.get("port"))
    if spec["type"] == "ExternalName":
        return
    spec.setdefault("internalTrafficPolicy", "Cluster")
    obj["status"].setdefault("loadBalancer", {})
    if old is not None:
        for name in ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"):
            if name in old["spec"]:
                spec.setdefault(name, old["spec"][name])


def _complete_service(cluster: Cluster, obj: Json) -> None:
    spec = obj["spec"]
    if spec["type"] == "ExternalName":
        return
    spec.setdefault("clusterIP", free_service_ip(cluster))
    spec.setdefault("clusterIPs", [spec["clusterIP"]])
    spec.setdefault("ipFamilies", ["IPv4"])
    spec.setdefault("ipFamilyPolicy", "SingleStack")


def free_service_ip(cluster: Cluster) -> str:
    """An address of the service network that no service holds, drawn at random as a real API server does: two clusters
    on one machine then hardly ever meet. Raises ApiError 500 when full."""
    taken = {stored.obj["spec"].get("clusterIP") for stored in cluster.store.all(("", "services"))}
    count = SERVICE_NETWORK.num_addresses - 1 - _FIRST_SERVICE_IP
    start = cluster.rng.randrange(count)
    for step in range(count):
        address = str(SERVICE_NETWORK[_FIRST_SERVICE_IP + (start + step) % count])
        if address not in taken:
            return address
    raise ApiError(500, "InternalError", f"no free address left in the service network {SERVICE_NETWORK}")


def _check_service(obj: Json, old: Json | None) -> list[Cause]:
    spec = obj["spec"]
    causes = []
    address = spec.get("clusterIP")
    if old is not None and old["spec"].get("clusterIP") not in (None, address):
        text = f'Invalid value: ["{address}"]: may not change once set'
        causes.append(Cause(field="spec.clusterIPs[0]", message=text))
    if not spec.get("ports") and address != "None" and spec["type"] != "ExternalName":
        causes.append(Cause(field="spec.ports", message="Required value", reason="FieldValueRequired"))
    if len(spec.get("ports") or ()) > 1:
        for index, port in enumerate(spec["ports"]):
            if not port.get("name"):
                path = f"spec.ports[{index}].name"
                causes.append(Cause(field=path, message="Required value", reason="FieldValueRequired"))
    return causes


def _disruption_budget(_cluster: Cluster, obj: Json, _old: Json | None) -> None:
    status = obj.setdefault("status", {})
    for count in ("disruptionsAllowed", "currentHealthy", "desiredHealthy", "expectedPods"):
        status.setdefault(count, 0)


def _event(_cluster: Cluster, obj: Json, _old: Json | None) -> None:
    obj.setdefault("source", {})
    for name in ("reportingComponent", "reportingInstance"):
        obj.setdefault(name, "")
    for name in ("firstTimestamp", "lastTimestamp", "eventTime"):
        obj.setdefault(name, None)


def _check_event(obj: Json, _old: Json | None) -> list[Cause]:
    about, own = obj.get("involvedObject", {}).get("namespace", ""), obj["metadata"].get("namespace", "")
    if about in (own, "") or (not about and own == "default"):
        return []
    text = f'Invalid value: "{about}": does not match event.namespace'
    return [Cause(field="involvedObject.namespace", message=text)]


_WORKLOAD_STRUCTS = (
    "spec",
    "status",
    "spec.template",
    "spec.template.metadata",
    "spec.template.spec",
    "spec.template.spec.containers",
)
_PLAIN = Strategy()
_STRATEGIES: dict[tuple[str, str], Strategy] = {
    ("", "namespaces"): Strategy(prepare=_namespace, complete=_complete_namespace),
    ("", "pods"): Strategy(
        prepare=workloads.prepare_pod,
        complete=workloads.complete_pod,
        check=workloads.check_pod,
        has_generation=True,
        returns_deleted=True,
        structs=("spec", "status", "spec.containers"),
    ),
    ("", "services"): Strategy(
        prepare=_service,
        check=_check_service,
        returns_deleted=True,
        complete=_complete_service,
    ),
    ("", "serviceaccounts"): Strategy(returns_deleted=True),
    ("", "persistentvolumeclaims"): Strategy(returns_deleted=True),
    ("", "resourcequotas"): Strategy(returns_deleted=True),
    ("", "nodes"): Strategy(
        complete=_complete_node, structs=("spec", "status", "status.nodeInfo", "status.daemonEndpoints")
    ),
    ("", "events"): Strategy(
        prepare=_event, check=_check_event, structs=("source", "reportingComponent", "reportingInstance")
    ),
    ("apps", "deployments"): Strategy(
        prepare=workloads.prepare_deployment,
        check=workloads.check_workload,
        has_generation=True,
        structs=(*_WORKLOAD_STRUCTS, "spec.strategy"),
    ),
    ("apps", "replicasets"): Strategy(
        prepare=workloads.prepare_replica_set,
        check=workloads.check_workload,
        has_generation=True,
        structs=_WORKLOAD_STRUCTS,
    ),
    ("policy", "poddisruptionbudgets"): Strategy(
        prepare=_disruption_budget, check=workloads.check_budget, has_generation=True
    ),
    ("discovery.k8s.io", "endpointslices"): Strategy(has_generation=True),
    ("apiextensions.k8s.io", "customresourcedefinitions"): Strategy(
        prepare=prepare_crd,
        check=check_crd,
        has_generation=True,
        returns_deleted=True,
        structs=("spec", "spec.names", "status"),
    ),
}
_CUSTOM = Strategy(has_generation=True, structs=())


def strategy_of(resource: Resource) -> Strategy:
    """The hooks of a resource."""
    return _CUSTOM if resource.custom else _STRATEGIES.get(resource.collection, _PLAIN)
