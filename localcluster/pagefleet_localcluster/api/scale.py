"""The scale subresource: an autoscaling/v1 Scale over any resource that counts replicas."""

from typing import Any

from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.errors import Cause, bad_request, invalid, not_found
from pagefleet_localcluster.api.resources import Resource, ScalePaths
from pagefleet_localcluster.api.selectors import format_selector
from pagefleet_localcluster.api.store import Name, Stored
from pagefleet_localcluster.api.writes import WriteOptions, update

Json = dict[str, Any]


def scale_of(resource: Resource, stored: Stored) -> Json:
    """The Scale of an object. Raises ApiError 404 when a custom object has no count yet."""
    paths, obj, meta = _paths(resource), stored.obj, stored.obj["metadata"]
    wanted = _get(obj, paths.spec)
    if wanted is None and resource.custom:
        path = "." + ".".join(paths.spec)
        raise bad_request(f"the spec replicas field {path!r} does not exist")
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    scale: Json = {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {key: meta[key] for key in kept if key in meta},
        "spec": {"replicas": wanted} if wanted else {},
        "status": {"replicas": _get(obj, paths.status) or 0},
    }
    if paths.selector is None:
        selector = format_selector(obj["spec"].get("selector") or {})
    else:
        selector = str(_get(obj, paths.selector) or "") if paths.selector else ""
    if selector:
        scale["status"]["selector"] = selector
    return scale


def set_scale(cluster: Cluster, resource: Resource, name: Name, scale: Any, options: WriteOptions) -> Stored:
    """Writes a Scale's wanted count into its object. Raises ApiError."""
    stored = cluster.get(resource, name)
    if stored is None:
        raise not_found(resource.plural, resource.group, name[1])
    if not isinstance(scale, dict) or scale.get("kind", "Scale") != "Scale":
        raise bad_request("the body of the scale subresource must be an autoscaling/v1 Scale")
    wanted = (scale.get("spec") or {}).get("replicas", 0)
    if isinstance(wanted, bool) or not isinstance(wanted, int):
        raise bad_request(f"spec.replicas of a Scale must be a whole number, it is {wanted!r}")
    if wanted < 0 and not resource.custom:
        text = f"Invalid value: {wanted}: must be greater than or equal to 0"
        causes = [Cause(field="spec.replicas", message=text)]
        raise invalid("Scale", "autoscaling", name[1], causes)
    obj = stored.copy()
    given = scale.get("metadata") or {}
    obj["metadata"]["resourceVersion"] = given.get("resourceVersion") or str(stored.version)
    if given.get("uid"):
        obj["metadata"]["uid"] = given["uid"]
    parent = obj
    path = _paths(resource).spec
    for part in path[:-1]:
        parent = parent.setdefault(part, {})
    parent[path[-1]] = wanted
    return update(cluster, resource, name, obj, options)


def _paths(resource: Resource) -> ScalePaths:
    if resource.scale is None:
        raise not_found(f"{resource.plural}/scale", resource.group, "")
    return resource.scale


def _get(obj: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        obj = obj.get(part) if isinstance(obj, dict) else None
    return obj
