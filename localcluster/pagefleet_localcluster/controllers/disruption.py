"""PodDisruptionBudget status: how many pods may be evicted now."""

import time
from collections.abc import Callable, Sequence

from pagefleet_localcluster.client import DISRUPTION_BUDGETS, Client
from pagefleet_localcluster.objects import (
    Object,
    controller_of,
    format_time,
    is_deleted,
    is_pod_active,
    is_pod_finished,
    is_pod_ready,
    labels_of,
    parse_time,
    resolve_percent,
    selector_matches,
)
from pagefleet_localcluster.reflector import Reflector

EVICTION_TIMEOUT_SECONDS = 120.0
"""An eviction that did not delete its pod within this time no longer counts."""


class DisruptionController:
    """Reconciles one PodDisruptionBudget at a time."""

    def __init__(
        self,
        client: Client,
        budgets: Reflector,
        pods: Reflector,
        replica_sets: Reflector,
        deployments: Reflector,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._budgets = budgets
        self._pods = pods
        self._scales = {"ReplicaSet": replica_sets, "Deployment": deployments}
        self._clock = clock

    async def reconcile(self, key: str) -> float | None:
        """One synchronisation of the budget `key`."""
        budget = self._budgets.objects.get(key)
        if budget is None or is_deleted(budget):
            return None
        namespace = budget["metadata"]["namespace"]
        pods = [
            pod
            for pod in self._pods.objects.values()
            if pod["metadata"]["namespace"] == namespace
            and selector_matches(budget["spec"].get("selector"), labels_of(pod))
            and not is_pod_finished(pod)
        ]
        status = budget_status(budget, pods, self._expected(pods), self._clock())
        if status != budget.get("status"):
            body = {**budget, "status": status}
            self._budgets.record(await self._client.replace(DISRUPTION_BUDGETS, body, "status"))
        waiting = status.get("disruptedPods")
        return EVICTION_TIMEOUT_SECONDS if waiting else None

    def _expected(self, pods: Sequence[Object]) -> int:
        """Replicas that the pods' controllers want; a bare pod counts as one."""
        scales: dict[str, int] = {}
        for pod in pods:
            uid, size = pod["metadata"]["uid"], 1
            reference = controller_of(pod)
            while reference is not None and reference["kind"] in self._scales:
                owners = self._scales[reference["kind"]].objects
                owner = owners.get(f"{pod['metadata']['namespace']}/{reference['name']}")
                if owner is None:
                    break
                uid, size = owner["metadata"]["uid"], int(owner["spec"].get("replicas", 1))
                reference = controller_of(owner)
            scales[uid] = size
        return sum(scales.values())


def budget_status(budget: Object, pods: Sequence[Object], expected: int, now: float) -> Object:
    """The wanted `status`. `expected`: replicas that the pods' controllers want."""
    spec, before = budget["spec"], budget.get("status") or {}
    present = {str(pod["metadata"]["name"]) for pod in pods if is_pod_active(pod)}
    disrupted = {
        name: when
        for name, when in (before.get("disruptedPods") or {}).items()
        if name in present and parse_time(when) + EVICTION_TIMEOUT_SECONDS > now
    }
    healthy = sum(
        is_pod_ready(pod) and not is_deleted(pod) and pod["metadata"]["name"] not in disrupted for pod in pods
    )
    if "maxUnavailable" in spec:
        desired = max(0, expected - resolve_percent(spec["maxUnavailable"], expected, round_up=True))
    else:
        minimum = spec.get("minAvailable", 1)
        expected = expected if isinstance(minimum, str) else len(pods)
        desired = resolve_percent(minimum, expected, round_up=True)
    allowed = max(0, healthy - desired) if expected else 0
    value, reason = ("True", "SufficientPods") if allowed else ("False", "InsufficientPods")
    generation = budget["metadata"].get("generation", 1)
    old = next((c for c in before.get("conditions") or () if c["type"] == "DisruptionAllowed"), None)
    condition = {
        "type": "DisruptionAllowed",
        "status": value,
        "observedGeneration": generation,
        "lastTransitionTime": (
            old["lastTransitionTime"] if old is not None and old["status"] == value else format_time(now)
        ),
        "reason": reason,
        "message": "",
    }
    return {
        "observedGeneration": generation,
        **({"disruptedPods": disrupted} if disrupted else {}),
        "disruptionsAllowed": allowed,
        "currentHealthy": healthy,
        "desiredHealthy": desired,
        "expectedPods": expected,
        "conditions": [condition],
    }
