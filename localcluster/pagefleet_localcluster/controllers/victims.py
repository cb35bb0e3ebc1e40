"""Which pods a ReplicaSet deletes first when it shrinks. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

from pagefleet_localcluster.objects import Object, annotations_of, condition_of, is_pod_active, is_pod_ready, parse_time

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_PHASES = {"Pending": 0, "Unknown": 1, "Running": 2}


def choose_victims(pods: Sequence[Object], count: int, related: Iterable[Object]) -> list[Object]:
    """`count` of `pods` in Kubernetes' order: unassigned, pending, not ready, lower deletion cost, more of the
    `related` pods (those of the same owner's ReplicaSets) on its node, ready more recently, more restarts, younger.

    Kubernetes compares ages by their order of magnitude only and then by uid; here the younger always goes first."""
    per_node = Counter(pod["spec"].get("nodeName") for pod in related if is_pod_active(pod))

    def rank(pod: Object) -> tuple[float | bool | str, ...]:
        ready = is_pod_ready(pod)
        condition = condition_of(pod, "Ready")
        ready_since = parse_time(condition.get("lastTransitionTime")) if ready and condition is not None else 0.0
        statuses = (pod.get("status") or {}).get("containerStatuses") or ()
        return (
            bool(pod["spec"].get("nodeName")),
            _PHASES.get((pod.get("status") or {}).get("phase", "Unknown"), 1),
            ready,
            deletion_cost(pod),
            -per_node[pod["spec"].get("nodeName")],
            -ready_since,
            -max((int(status.get("restartCount", 0)) for status in statuses), default=0),
            -parse_time(pod["metadata"].get("creationTimestamp")),
            pod["metadata"]["uid"],
        )

    return sorted(pods, key=rank)[:count]


def deletion_cost(pod: Object) -> int:
    """The `pod-deletion-cost` annotation; 0 when absent or no 32-bit integer."""
    text = annotations_of(pod).get(DELETION_COST, "0")
    try:
        cost = int(text)
    except ValueError:
        return 0
    return cost if -(2**31) <= cost < 2**31 else 0
