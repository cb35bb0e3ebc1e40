"""Which node a pod fits on, and the scheduler's words when it fits on none. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from pagefleet_localcluster.objects import (
    ZERO,
    Object,
    condition_of,
    controller_of,
    is_pod_finished,
    labels_of,
    name_of,
    parse_quantity,
    pod_requests,
    requirement_matches,
    selector_matches,
)


@dataclass(frozen=True)
class Placement:
    """Either a node's name, or why there is none."""

    node: str | None
    message: str = ""


def place(pod: Object, nodes: Sequence[Object], pods: Iterable[Object]) -> Placement:
    """The fitting node with the fewest pods of the same controller, then with the smallest share of it requested.

    Considered: readiness and taints, nodeSelector and required node affinity, required pod anti-affinity over host
    names, requests against allocatable. Preferences, pod affinity and topology spread are not."""
    if not nodes:
        return Placement(None, "no nodes available to schedule pods")
    placed: dict[str, list[Object]] = {name_of(node): [] for node in nodes}
    for other in pods:
        if (node := other["spec"].get("nodeName")) in placed and not is_pod_finished(other):
            placed[node].append(other)
    reasons: Counter[str] = Counter()
    hopeless = 0
    fitting = []
    for node in nodes:
        found, helpless = _obstacles(pod, node, placed[name_of(node)])
        reasons.update(found)
        hopeless += bool(found) and helpless
        if not found:
            fitting.append(node)
    if fitting:
        owner = (controller_of(pod) or {}).get("uid")

        def load(node: Object) -> tuple[int, float, str]:
            mine = placed[name_of(node)]
            siblings = sum(owner is not None and (controller_of(p) or {}).get("uid") == owner for p in mine)
            return siblings, _used_share(node, mine), name_of(node)

        return Placement(name_of(min(fitting, key=load)))
    total = len(nodes)
    why = ", ".join(sorted(f"{count} {reason}" for reason, count in reasons.items()))
    preemption = {
        f"{total - hopeless} No preemption victims found for incoming pod": total - hopeless,
        f"{hopeless} Preemption is not helpful for scheduling": hopeless,
    }
    outlook = ", ".join(sorted(text for text, count in preemption.items() if count))
    return Placement(
        None, f"0/{total} nodes are available: {why}. preemption: 0/{total} nodes are available: {outlook}."
    )


def missing_claim(name: str, num_nodes: int) -> Placement:
    """The scheduler's words for a pod whose PersistentVolumeClaim does not exist."""
    nodes = f"0/{num_nodes} nodes are available"
    return Placement(
        None,
        f'{nodes}: persistentvolumeclaim "{name}" not found. '
        f"preemption: {nodes}: {num_nodes} Preemption is not helpful for scheduling.",
    )


def _obstacles(pod: Object, node: Object, placed: Sequence[Object]) -> tuple[list[str], bool]:
    """(reasons why the pod cannot run there, whether removing pods would not help either)."""
    spec = pod["spec"]
    if node["spec"].get("unschedulable") and not _tolerates(
        spec, {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    ):
        return ["node(s) were unschedulable"], True
    for taint in _taints(node):
        if taint["effect"] in ("NoSchedule", "NoExecute") and not _tolerates(spec, taint):
            return ["node(s) had untolerated taint(s)"], True
    if not _affine(spec, node):
        return ["node(s) didn't match Pod's node affinity/selector"], True
    allocatable = {key: parse_quantity(value) for key, value in node["status"].get("allocatable", {}).items()}
    used = _used(placed)
    requests = pod_requests(pod)
    reasons = ["Too many pods"] if len(placed) + 1 > allocatable.get("pods", 110) else []
    short = [key for key, need in requests.items() if need and used[key] + need > allocatable.get(key, 0)]
    reasons += [f"Insufficient {key}" for key in short]
    helpless = any(requests[key] > allocatable.get(key, 0) for key in short)
    if not reasons and _repelled(pod, placed):
        return ["node(s) didn't match pod anti-affinity rules"], False
    return reasons, helpless


def _taints(node: Object) -> list[Object]:
    taints: list[Object] = list(node["spec"].get("taints") or ())
    ready = condition_of(node, "Ready")
    if ready is None or ready["status"] != "True":
        taints.append({"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"})
    return taints


def _tolerates(spec: Object, taint: Object) -> bool:
    for toleration in spec.get("tolerations") or ():
        same_key = toleration.get("key") in (None, "", taint["key"])
        same_effect = toleration.get("effect") in (None, "", taint["effect"])
        exists = toleration.get("operator") == "Exists"
        if same_key and same_effect and (exists or toleration.get("value", "") == taint.get("value", "")):
            return True
    return False


def _affine(spec: Object, node: Object) -> bool:
    labels = labels_of(node)
    if not (spec.get("nodeSelector") or {}).items() <= labels.items():
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    return any(
        all(requirement_matches(r, labels) for r in term.get("matchExpressions") or ())
        and all(requirement_matches(r, {"metadata.name": name_of(node)}) for r in term.get("matchFields") or ())
        for term in required["nodeSelectorTerms"]
    )


def _repelled(pod: Object, placed: Sequence[Object]) -> bool:
    """Required anti-affinity with topologyKey kubernetes.io/hostname, in the pod's own namespace."""
    anti = ((pod["spec"].get("affinity") or {}).get("podAntiAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    return any(
        term.get("topologyKey") == "kubernetes.io/hostname"
        and selector_matches(term.get("labelSelector"), labels_of(other))
        and other["metadata"]["namespace"] == pod["metadata"]["namespace"]
        for term in anti or ()
        for other in placed
    )


def _used_share(node: Object, placed: Sequence[Object]) -> float:
    allocatable = {key: parse_quantity(value) for key, value in node["status"].get("allocatable", {}).items()}
    used = _used(placed) | {"pods": Decimal(len(placed))}
    return float(sum(used.get(key, ZERO) / size for key, size in allocatable.items() if size))


def _used(placed: Sequence[Object]) -> defaultdict[str, Decimal]:
    used: defaultdict[str, Decimal] = defaultdict(Decimal)
    for pod in placed:
        for key, amount in pod_requests(pod).items():
            used[key] += amount
    return used
