"""Notices dead nodes by their leases, taints them, and evicts their pods when their tolerations run out."""

import time
from collections.abc import Callable

from pagefleet_localcluster.client import LEASES, NODES, PODS, ApiError, Client
from pagefleet_localcluster.objects import (
    Object,
    condition_of,
    format_time,
    is_deleted,
    name_of,
    parse_time,
)
from pagefleet_localcluster.reflector import Reflector

UNREACHABLE_TAINT = "node.kubernetes.io/unreachable"
NOT_READY_TAINT = "node.kubernetes.io/not-ready"
"""The API server puts it on every new node."""
_STALE_CONDITIONS = ("MemoryPressure", "DiskPressure", "PIDPressure", "Ready")


class NodeLifecycleController:
    """Reconciles one node at a time, again every `check_seconds`."""

    def __init__(
        self,
        client: Client,
        nodes: Reflector,
        pods: Reflector,
        *,
        grace_seconds: float = 40.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._nodes = nodes
        self._pods = pods
        self._grace_seconds = grace_seconds
        self._clock = clock

    async def reconcile(self, key: str) -> float | None:
        """Judge the node `key`; force the end of pods that are bound to a node that is no more."""
        node = self._nodes.objects.get(key)
        pods = [pod for pod in self._pods.objects.values() if pod["spec"].get("nodeName") == key]
        if node is None:
            for pod in pods:
                await self._delete(pod, force=True)
            return None
        alive = await self._is_alive(key)
        tainted = next((t for t in node["spec"].get("taints") or () if t["key"] == UNREACHABLE_TAINT), None)
        if alive == (tainted is not None) or (alive and _is_new_and_ready(node)):
            await self._mark(node, alive)
        if not alive:
            await self._evict(pods, self._clock() if tainted is None else parse_time(tainted.get("timeAdded")))
        return self._grace_seconds / 8

    async def _is_alive(self, name: str) -> bool:
        try:
            lease = await self._client.get(LEASES, name, "kube-node-lease")
        except ApiError as error:
            if error.code != 404:
                raise
            return True  # not a node of ours, or one that has just been created
        return self._clock() - parse_time(lease["spec"].get("renewTime")) < self._grace_seconds

    async def _mark(self, node: Object, alive: bool) -> None:
        moment = format_time(self._clock())
        taints = [t for t in node["spec"].get("taints") or () if t["key"] not in (UNREACHABLE_TAINT, NOT_READY_TAINT)]
        if not alive:
            taints += [
                {"key": UNREACHABLE_TAINT, "effect": effect, "timeAdded": moment}
                for effect in ("NoExecute", "NoSchedule")
            ]
            conditions = [c for c in node["status"].get("conditions") or () if c["type"] not in _STALE_CONDITIONS]
            conditions += [
                {
                    **(condition_of(node, kind) or {"type": kind}),
                    "status": "Unknown",
                    "lastTransitionTime": moment,
                    "reason": "NodeStatusUnknown",
                    "message": "Kubelet stopped posting node status.",
                }
                for kind in _STALE_CONDITIONS
            ]
            await self._client.patch(NODES, name_of(node), {"status": {"conditions": conditions}}, subresource="status")
            for pod in self._pods.objects.values():
                if pod["spec"].get("nodeName") == name_of(node):
                    await self._mark_not_ready(pod, moment)
        self._nodes.record(await self._client.patch(NODES, name_of(node), {"spec": {"taints": taints}}))

    async def _mark_not_ready(self, pod: Object, moment: str) -> None:
        ready = condition_of(pod, "Ready")
        if ready is None or ready["status"] != "True":
            return
        others = [c for c in pod["status"]["conditions"] if c["type"] != "Ready"]
        status = {"conditions": [*others, {**ready, "status": "False", "lastTransitionTime": moment}]}
        await self._client.patch(
            PODS, name_of(pod), {"status": status}, pod["metadata"]["namespace"], subresource="status"
        )

    async def _evict(self, pods: list[Object], dead_since: float) -> None:
        for pod in pods:
            waits = [
                float(t.get("tolerationSeconds", float("inf")))
                for t in pod["spec"].get("tolerations") or ()
                if t.get("key") in (None, "", UNREACHABLE_TAINT) and t.get("effect") in (None, "", "NoExecute")
            ]
            if not is_deleted(pod) and self._clock() >= dead_since + min(waits, default=0.0):
                await self._delete(pod, force=False)

    async def _delete(self, pod: Object, *, force: bool) -> None:
        try:
            await self._client.delete(
                PODS,
                name_of(pod),
                pod["metadata"]["namespace"],
                uid=pod["metadata"]["uid"],
                grace_seconds=0 if force else None,
            )
        except ApiError as error:
            if error.code not in (404, 409):
                raise


def _is_new_and_ready(node: Object) -> bool:
    ready = condition_of(node, "Ready")
    tainted = any(taint["key"] == NOT_READY_TAINT for taint in node["spec"].get("taints") or ())
    return tainted and ready is not None and ready["status"] == "True"
