"""Keeps as many pods as a ReplicaSet wants, and its status."""

import asyncio
import copy
import time
from collections.abc import Callable

from pagefleet_localcluster.client import PODS, REPLICA_SETS, UNREACHABLE, ApiError, Client
from pagefleet_localcluster.controllers.victims import choose_victims
from pagefleet_localcluster.event_recorder import EventRecorder
from pagefleet_localcluster.objects import (
    Object,
    available_in_seconds,
    controller_of,
    format_time,
    is_controlled_by,
    is_deleted,
    is_pod_active,
    is_pod_finished,
    is_pod_ready,
    labels_of,
    name_of,
    owner_reference,
    selector_matches,
)
from pagefleet_localcluster.reflector import Reflector

MAX_PODS_PER_SYNC = 500


class ReplicaSetController:
    """Reconciles one ReplicaSet at a time from the reflectors' copies."""

    def __init__(
        self, client: Client, replica_sets: Reflector, pods: Reflector, clock: Callable[[], float] = time.time
    ) -> None:
        self._client = client
        self._replica_sets = replica_sets
        self._pods = pods
        self._clock = clock
        self.events = EventRecorder(client, "replicaset-controller")

    async def reconcile(self, key: str) -> float | None:
        """One synchronisation of the ReplicaSet `key`."""
        replica_set = self._replica_sets.objects.get(key)
        if replica_set is None:
            return None
        await self._claim(replica_set)
        failure: tuple[str, str] | None = None
        if not is_deleted(replica_set):
            failure = await self._manage(replica_set)
        status, again = replica_set_status(replica_set, self._pods_of(replica_set), failure, self._clock())
        if status != replica_set.get("status"):
            body = {**self._replica_sets.objects.get(key, replica_set), "status": status}
            self._replica_sets.record(await self._client.replace(REPLICA_SETS, body, "status"))
        if failure is not None:
            raise ApiError(500, failure[0], failure[1])
        return again

    def _pods_of(self, replica_set: Object) -> list[Object]:
        namespace = replica_set["metadata"]["namespace"]
        return [
            pod
            for pod in self._pods.objects.values()
            if pod["metadata"]["namespace"] == namespace and is_controlled_by(pod, replica_set)
        ]

    async def _claim(self, replica_set: Object) -> None:
        """Adopt matching pods without a controller, release own pods whose labels no longer match."""
        namespace, selector = replica_set["metadata"]["namespace"], replica_set["spec"]["selector"]
        reference = owner_reference(replica_set, "apps/v1", "ReplicaSet")
        for pod in list(self._pods.objects.values()):
            if pod["metadata"]["namespace"] != namespace or is_deleted(pod):
                continue
            matches = selector_matches(selector, labels_of(pod))
            others = [r for r in pod["metadata"].get("ownerReferences") or () if r.get("uid") != reference["uid"]]
            if matches and controller_of(pod) is None and not is_pod_finished(pod) and not is_deleted(replica_set):
                owners = [*others, reference]
            elif not matches and is_controlled_by(pod, replica_set):
                owners = others
            else:
                continue
            patch = {"metadata": {"ownerReferences": owners, "uid": pod["metadata"]["uid"]}}
            self._pods.record(await self._client.patch(PODS, name_of(pod), patch, namespace))

    async def _manage(self, replica_set: Object) -> tuple[str, str] | None:
        """Create or delete pods; returns (reason, message) of the first failure."""
        active = [pod for pod in self._pods_of(replica_set) if is_pod_active(pod)]
        surplus = len(active) - int(replica_set["spec"].get("replicas", 1))
        if surplus < 0:
            return await self._create_pods(replica_set, min(-surplus, MAX_PODS_PER_SYNC))
        for pod in choose_victims(active, surplus, self._related(replica_set))[:MAX_PODS_PER_SYNC]:
            try:
                answer = await self._client.delete(
                    PODS, name_of(pod), pod["metadata"]["namespace"], uid=pod["metadata"]["uid"]
                )
            except ApiError as error:
                if error.code in (404, 409):
                    continue
                self._say(replica_set, "Warning", "FailedDelete", f"Error deleting: {error.message}")
                return "FailedDelete", error.message
            if "spec" in answer:
                self._pods.record(answer)
            self._say(replica_set, "Normal", "SuccessfulDelete", f"Deleted pod: {name_of(pod)}")
        return None

    async def _create_pods(self, replica_set: Object, count: int) -> tuple[str, str] | None:
        """Slow start: 1, 2, 4 ... pods at a time, so that a refusal (a quota) is met once and not `count` times."""
        batch = 1
        while count:
            batch = min(batch, count)
            results = await asyncio.gather(
                *(self._create_pod(replica_set) for _ in range(batch)), return_exceptions=True
            )
            for result in results:
                if isinstance(result, ApiError):
                    self._say(replica_set, "Warning", "FailedCreate", f"Error creating: {result.message}")
                    return "FailedCreate", result.message
                if isinstance(result, UNREACHABLE):
                    return "FailedCreate", str(result)
                if isinstance(result, BaseException):
                    raise result
            count -= batch
            batch *= 2
        return None

    async def _create_pod(self, replica_set: Object) -> None:
        template = copy.deepcopy(replica_set["spec"]["template"])
        metadata = template.get("metadata") or {}
        pod = {
            "metadata": {
                "generateName": f"{name_of(replica_set)}-",
                "namespace": replica_set["metadata"]["namespace"],
                **{key: metadata[key] for key in ("labels", "annotations") if metadata.get(key)},
                "ownerReferences": [owner_reference(replica_set, "apps/v1", "ReplicaSet")],
            },
            "spec": template["spec"],
        }
        created = await self._client.create(PODS, pod, replica_set["metadata"]["namespace"])
        self._pods.record(created)
        self._say(replica_set, "Normal", "SuccessfulCreate", f"Created pod: {name_of(created)}")

    def _related(self, replica_set: Object) -> list[Object]:
        """Pods of every ReplicaSet of the same owner."""
        owner = controller_of(replica_set)
        siblings = {replica_set["metadata"]["uid"]} | {
            rs["metadata"]["uid"]
            for rs in self._replica_sets.objects.values()
            if owner is not None and (other := controller_of(rs)) is not None and other.get("uid") == owner.get("uid")
        }
        return [
            pod
            for pod in self._pods.objects.values()
            if (reference := controller_of(pod)) is not None and reference.get("uid") in siblings
        ]

    def _say(self, replica_set: Object, type: str, reason: str, message: str) -> None:
        self.events.record(replica_set, "apps/v1", "ReplicaSet", type=type, reason=reason, message=message)


def replica_set_status(
    replica_set: Object, pods: list[Object], failure: tuple[str, str] | None, now: float
) -> tuple[Object, float | None]:
    """(status, seconds until a ready pod becomes available) of a ReplicaSet with these pods."""
    active = [pod for pod in pods if is_pod_active(pod)]
    minimum = int(replica_set["spec"].get("minReadySeconds", 0))
    waits = [wait for pod in active if (wait := available_in_seconds(pod, minimum, now)) is not None]
    wanted_labels = (replica_set["spec"]["template"].get("metadata") or {}).get("labels") or {}
    counts = {
        "fullyLabeledReplicas": sum(wanted_labels.items() <= labels_of(pod).items() for pod in active),
        "readyReplicas": sum(map(is_pod_ready, active)),
        "availableReplicas": sum(wait == 0 for wait in waits),
    }
    before = (replica_set.get("status") or {}).get("conditions") or []
    conditions = [condition for condition in before if condition["type"] != "ReplicaFailure"]
    if failure is not None:
        old = next((c for c in before if c["type"] == "ReplicaFailure"), None)
        # The first message stays: later ones differ only by the name of the pod that could not be created.
        conditions.append(
            old
            or {
                "type": "ReplicaFailure",
                "status": "True",
                "lastTransitionTime": format_time(now),
                "reason": failure[0],
                "message": failure[1],
            }
        )
    status = {
        "replicas": len(active),
        **{key: count for key, count in counts.items() if count},
        "terminatingReplicas": sum(is_deleted(pod) and not is_pod_finished(pod) for pod in pods),
        "observedGeneration": replica_set["metadata"].get("generation", 0),
        **({"conditions": conditions} if conditions else {}),
    }
    return status, min((wait for wait in waits if wait > 0), default=None)
