"""What is posted to a pod: binding it to a node, evicting it."""

from typing import Any

from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.deletion import delete, parse_delete_options
from pagefleet_localcluster.api.errors import ApiError, conflict, not_found
from pagefleet_localcluster.api.resources import Resource
from pagefleet_localcluster.api.store import Name, Stored
from pagefleet_localcluster.objects import labels_of, selector_matches

Json = dict[str, Any]
_BUDGETS = ("policy", "poddisruptionbudgets")


def success(code: int = 201) -> Json:
    """The Status of an action that went well."""
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": code}


def bind(cluster: Cluster, pods: Resource, name: Name, body: Json) -> Json:
    """Assigns a pod to a node. Raises ApiError 409 when it has one."""
    node = (body.get("target") or {}).get("name")
    if not node:
        raise ApiError(500, "", "target.name: Required value")
    pod = _pod(cluster, pods, name)
    obj = pod.copy()
    if obj["spec"].get("nodeName"):
        why = f'pod {name[1]} is already assigned to node "{obj["spec"]["nodeName"]}"'
        raise conflict("pods/binding", "", name[1], why)
    if obj["metadata"].get("deletionTimestamp"):
        raise conflict("pods/binding", "", name[1], f"pod {name[1]} is being deleted, cannot be assigned to a host")
    obj["spec"]["nodeName"] = node
    kept = [c for c in obj["status"].get("conditions") or () if c.get("type") != "PodScheduled"]
    obj["status"]["conditions"] = [
        *kept,
        {"type": "PodScheduled", "status": "True", "lastProbeTime": None, "lastTransitionTime": cluster.now()},
    ]
    cluster.store.put(pods.collection, name, obj)
    return success()


def evict(cluster: Cluster, pods: Resource, name: Name, body: Json) -> Json:
    """Deletes a pod if its disruption budget allows. Raises ApiError 429 when not."""
    pod = _pod(cluster, pods, name)
    options = parse_delete_options(body.get("deleteOptions") or {}, {})
    if not options.dry_run and _counts(pod.obj):
        _take_disruption(cluster, pod.obj)
    delete(cluster, pods, name, options)
    return success()


def _counts(pod: Json) -> bool:
    """Whether losing the pod disrupts anything: not when it has not started, has ended or is leaving."""
    if pod["metadata"].get("deletionTimestamp"):
        return False
    return pod.get("status", {}).get("phase") not in ("Pending", "Succeeded", "Failed")


def _take_disruption(cluster: Cluster, pod: Json) -> None:
    namespace, pod_name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    found = [
        stored
        for stored in cluster.store.all(_BUDGETS, namespace)
        if (selector := stored.obj["spec"].get("selector")) and selector_matches(selector, labels_of(pod))
    ]
    if len(found) > 1:
        text = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
        raise ApiError(500, "InternalError", text)
    if not found:
        return
    obj = found[0].copy()
    budget_name, status = obj["metadata"]["name"], obj.setdefault("status", {})
    if status.get("observedGeneration", 0) < obj["metadata"].get("generation", 0):
        raise _too_many(f"The disruption budget {budget_name} is still being processed by the server.")
    allowed = status.get("disruptionsAllowed", 0)
    if allowed <= 0:
        desired, healthy = status.get("desiredHealthy", 0), status.get("currentHealthy", 0)
        raise _too_many(
            f"The disruption budget {budget_name} needs {desired} healthy pods and has {healthy} currently",
        )
    status["disruptionsAllowed"] = allowed - 1
    status.setdefault("disruptedPods", {})[pod_name] = cluster.now()
    cluster.store.put(_BUDGETS, (namespace, budget_name), obj)


def _too_many(why: str) -> ApiError:
    text = "Cannot evict pod as it would violate the pod's disruption budget."
    details = {"causes": [{"reason": "DisruptionBudget", "message": why}]}
    return ApiError(429, "TooManyRequests", text, details=details)


def _pod(cluster: Cluster, pods: Resource, name: Name) -> Stored:
    found = cluster.get(pods, name)
    if found is None:
        raise not_found("pods", "", name[1])
    return found
