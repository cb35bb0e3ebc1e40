"""Printer columns: what `kubectl get` shows of each resource."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagefleet_localcluster.api import pod_columns
from pagefleet_localcluster.api.json_paths import find
from pagefleet_localcluster.api.resources import Resource
from pagefleet_localcluster.api.selectors import format_selector
from pagefleet_localcluster.objects import parse_time

Json = dict[str, Any]
Cell = Callable[[Json, float], Any]
NONE, UNSET, UNKNOWN = "<none>", "<unset>", "<unknown>"


def age(text: Any, now: float) -> str:
    """Time since a timestamp, as kubectl shortens it: `45s`, `3m5s`, `4h`, `2d`."""
    try:
        seconds = int(now - parse_time(text)) if text else None
    except (TypeError, ValueError):
        return UNKNOWN
    if seconds is None:
        return UNKNOWN
    if seconds < 0:
        return "0s" if seconds > -2 else "<invalid>"
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 10:
        return f"{minutes}m{seconds % 60}s" if seconds % 60 else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    if hours < 192:
        return f"{days}d{hours % 24}h" if hours % 24 else f"{days}d"
    return f"{days}d" if days < 730 else f"{days // 365}y{days % 365}d" if days % 365 else f"{days // 365}y"


def _created(obj: Json, now: float) -> str:
    return age(obj["metadata"].get("creationTimestamp"), now)


def _at(path: str, default: Any = NONE) -> Cell:
    def cell(obj: Json, _now: float) -> Any:
        value = obj
        for part in path.split("."):
            value = value.get(part, {}) if isinstance(value, dict) else {}
        return default if value == {} else value

    return cell


def _size(path: str) -> Cell:
    return lambda obj, now: len(_at(path, ())(obj, now))


def _containers(key: str) -> Cell:
    def cell(obj: Json, _now: float) -> str:
        spec = obj["spec"].get("template", {}).get("spec", {})
        return ",".join(str(container.get(key, "")) for container in spec.get("containers") or ())

    return cell


def _selector(obj: Json, _now: float) -> str:
    return format_selector(obj["spec"].get("selector") or {}) or NONE


def _node_status(obj: Json, _now: float) -> str:
    conditions = obj.get("status", {}).get("conditions") or ()
    ready = next((c.get("status") for c in conditions if c.get("type") == "Ready"), "Unknown")
    text = {"True": "Ready", "False": "NotReady"}.get(ready, "Unknown" if not conditions else "NotReady")
    return text + (",SchedulingDisabled" if obj.get("spec", {}).get("unschedulable") else "")


def _node_roles(obj: Json, _now: float) -> str:
    prefix = "node-role.kubernetes.io/"
    names = [k.removeprefix(prefix) for k in obj["metadata"].get("labels") or {} if k.startswith(prefix)]
    return ",".join(sorted(names)) or NONE


def _node_address(kind: str) -> Cell:
    def cell(obj: Json, _now: float) -> str:
        addresses = obj.get("status", {}).get("addresses") or ()
        return next((a.get("address") for a in addresses if a.get("type") == kind), NONE)

    return cell


def _service_ports(obj: Json, _now: float) -> str:
    ports = obj["spec"].get("ports") or ()
    return ",".join(f"{port['port']}/{port.get('protocol', 'TCP')}" for port in ports) or NONE


def _service_selector(obj: Json, _now: float) -> str:
    return ",".join(f"{k}={v}" for k, v in sorted((obj["spec"].get("selector") or {}).items())) or NONE


def _slice_ports(obj: Json, _now: float) -> str:
    return ",".join(str(port.get("port", "")) for port in obj.get("ports") or ()) or UNSET


def _slice_endpoints(obj: Json, _now: float) -> str:
    found = [address for endpoint in obj.get("endpoints") or () for address in endpoint["addresses"]]
    more = f" + {len(found) - 3} more..." if len(found) > 3 else ""
    return ",".join(found[:3]) + more or UNSET


def _event_object(obj: Json, _now: float) -> str:
    about = obj.get("involvedObject") or {}
    return f"{about.get('kind', '').lower()}/{about.get('name', '')}"


def _event_time(*names: str) -> Cell:
    def cell(obj: Json, now: float) -> str:
        series = (obj.get("series") or {}).get("lastObservedTime") if names[0] == "lastTimestamp" else None
        return age(series or next((obj[name] for name in names if obj.get(name)), None), now)

    return cell


def _deployment_ready(obj: Json, _now: float) -> str:
    return f"{obj.get('status', {}).get('readyReplicas', 0)}/{obj['spec'].get('replicas', 0)}"


def _quota(kind: str) -> Cell:
    def cell(obj: Json, _now: float) -> str:
        status = obj.get("status") or {}
        hard, used = status.get("hard") or obj.get("spec", {}).get("hard") or {}, status.get("used") or {}
        names = [name for name in sorted(hard) if name.startswith("limits.") is (kind == "limits")]
        return ", ".join(f"{name}: {used.get(name, 0)}/{hard[name]}" for name in names)

    return cell


def _access_modes(obj: Json, _now: float) -> str:
    short = {"ReadWriteOnce": "RWO", "ReadOnlyMany": "ROX", "ReadWriteMany": "RWX", "ReadWriteOncePod": "RWOP"}
    return ",".join(short.get(mode, mode) for mode in obj.get("status", {}).get("accessModes") or ())


def _role(obj: Json, _now: float) -> str:
    return f"{obj['roleRef'].get('kind')}/{obj['roleRef'].get('name')}"


@dataclass(frozen=True)
class _Column:
    name: str
    cell: Cell
    type: str = "string"
    wide: bool = False


def _columns(*parts: _Column | tuple[str, Cell] | tuple[str, Cell, str]) -> tuple[_Column, ...]:
    return tuple(part if isinstance(part, _Column) else _Column(*part) for part in parts)


def _wide(name: str, cell: Cell) -> _Column:
    return _Column(name, cell, wide=True)


_NAME, _AGE = ("Name", _at("metadata.name")), ("Age", _created)
_TEMPLATE = (
    _wide("Containers", _containers("name")),
    _wide("Images", _containers("image")),
    _wide("Selector", _selector),
)
_BY_COLLECTION: dict[tuple[str, str], tuple[_Column, ...]] = {
    ("", "namespaces"): _columns(_NAME, ("Status", _at("status.phase")), _AGE),
    ("", "nodes"): _columns(
        _NAME, ("Status", _node_status), ("Roles", _node_roles), _AGE,
        ("Version", _at("status.nodeInfo.kubeletVersion", "")),
        _wide("Internal-IP", _node_address("InternalIP")), _wide("External-IP", _node_address("ExternalIP")),
        _wide("OS-Image", _at("status.nodeInfo.osImage", UNKNOWN)),
        _wide("Kernel-Version", _at("status.nodeInfo.kernelVersion", UNKNOWN)),
        _wide("Container-Runtime", _at("status.nodeInfo.containerRuntimeVersion", UNKNOWN))),
    ("", "pods"): _columns(
        _NAME, ("Ready", pod_columns.ready), ("Status", pod_columns.status),
        ("Restarts", lambda obj, now: pod_columns.restarts(obj, lambda at: age(at, now))), _AGE,
        _wide("IP", _at("status.podIP")), _wide("Node", _at("spec.nodeName")),
        _wide("Nominated Node", _at("status.nominatedNodeName")),
        _wide("Readiness Gates", pod_columns.readiness_gates)),
    ("", "services"): _columns(
        _NAME, ("Type", _at("spec.type")), ("Cluster-IP", _at("spec.clusterIP")),
        ("External-IP", _at("spec.externalName")),
        ("Port(s)", _service_ports), _AGE, _wide("Selector", _service_selector)),
    ("", "configmaps"): _columns(_NAME, ("Data", _size("data"), "integer"), _AGE),
    ("", "secrets"): _columns(_NAME, ("Type", _at("type")), ("Data", _size("data"), "integer"), _AGE),
    ("", "serviceaccounts"): _columns(_NAME, ("Secrets", _size("secrets"), "integer"), _AGE),
    ("", "events"): _columns(
        ("Last Seen", _event_time("lastTimestamp", "firstTimestamp", "eventTime")), ("Type", _at("type", "")),
        ("Reason", _at("reason", "")), ("Object", _event_object),
        _wide("Subobject", _at("involvedObject.fieldPath", "")),
        _wide("Source", _at("source.component", "")), ("Message", _at("message", "")),
        _wide("First Seen", _event_time("firstTimestamp", "eventTime")), _wide("Count", _at("count", 1)),
        _wide("Name", _at("metadata.name"))),
    ("", "persistentvolumeclaims"): _columns(
        _NAME, ("Status", _at("status.phase", "")), ("Volume", _at("spec.volumeName", "")),
        ("Capacity", _at("status.capacity.storage", "")),
        ("Access Modes", _access_modes),
        ("StorageClass", _at("spec.storageClassName", "")),
        ("VolumeAttributesClass", _at("spec.volumeAttributesClassName", UNSET)), _AGE,
        _wide("VolumeMode", _at("spec.volumeMode", UNSET))),
    ("", "resourcequotas"): _columns(_NAME, ("Request", _quota("requests")), ("Limit", _quota("limits")), _AGE),
    ("apps", "deployments"): _columns(
        _NAME, ("Ready", _deployment_ready), ("Up-to-date", _at("status.updatedReplicas", 0)),
        ("Available", _at("status.availableReplicas", 0)), _AGE, *_TEMPLATE),
    ("apps", "replicasets"): _columns(
        _NAME, ("Desired", _at("spec.replicas", 0), "integer"), ("Current", _at("status.replicas", 0), "integer"),
        ("Ready", _at("status.readyReplicas", 0), "integer"), _AGE, *_TEMPLATE),
    ("discovery.k8s.io", "endpointslices"): _columns(
        _NAME, ("AddressType", _at("addressType")), ("Ports", _slice_ports), ("Endpoints", _slice_endpoints), _AGE),
    ("coordination.k8s.io", "leases"): _columns(_NAME, ("Holder", _at("spec.holderIdentity", "")), _AGE),
    ("policy", "poddisruptionbudgets"): _columns(
        _NAME, ("Min Available", _at("spec.minAvailable", "N/A")),
        ("Max Unavailable", _at("spec.maxUnavailable", "N/A")),
        ("Allowed Disruptions", _at("status.disruptionsAllowed", 0), "integer"), _AGE),
    ("rbac.authorization.k8s.io", "rolebindings"): _columns(_NAME, ("Role", _role), _AGE),
    ("rbac.authorization.k8s.io", "clusterrolebindings"): _columns(_NAME, ("Role", _role), _AGE),
}  # fmt: skip
_OTHER = _columns(_NAME, ("Created At", _at("metadata.creationTimestamp"), "date"))


def columns_of(resource: Resource) -> list[Json]:
    """columnDefinitions of a resource's Table."""
    if resource.custom:
        own = [(c["name"], c["type"], c.get("format", ""), c.get("priority", 0)) for c in resource.columns]
    else:
        own = [(c.name, c.type, "", int(c.wide)) for c in _BY_COLLECTION.get(resource.collection, _OTHER)]
        own = [column for column in own if column[0] != "Name" or column[3]]
    found = [("Name", "string", "name", 0), *own]
    if resource.collection == ("", "events"):
        found = found[1:]
    keys = ("name", "type", "format", "priority")
    return [dict(zip(keys, column, strict=True)) | {"description": ""} for column in found]


def row_of(resource: Resource, obj: Json, now: float) -> list[Any]:
    """The cells of one object, in the order of `columns_of`."""
    if resource.custom:
        return [obj["metadata"]["name"], *(_custom_cell(column, obj, now) for column in resource.columns)]
    return [column.cell(obj, now) for column in _BY_COLLECTION.get(resource.collection, _OTHER)]


def _custom_cell(column: Json, obj: Json, now: float) -> Any:
    found = find(obj, column["jsonPath"])
    if not found or found[0] is None:
        return None
    value = found[0]
    match column["type"]:
        case "date":
            return age(value, now)
        case "integer":
            return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
        case "number":
            return value if isinstance(value, int | float) and not isinstance(value, bool) else None
        case "boolean":
            return value if isinstance(value, bool) else None
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else str(value)
