"""Binds pods to nodes."""

import time
from collections.abc import Callable

from pagefleet_localcluster.client import PODS, STRATEGIC, Client
from pagefleet_localcluster.controllers.placement import missing_claim, place
from pagefleet_localcluster.event_recorder import EventRecorder
from pagefleet_localcluster.objects import (
    Object,
    condition_of,
    format_time,
    is_deleted,
    is_pod_finished,
    key_of,
    name_of,
)
from pagefleet_localcluster.reflector import Reflector


class Scheduler:
    """Places one pod at a time; `blocked` holds the keys of pods that found no node, longest waiting first."""

    def __init__(
        self,
        client: Client,
        pods: Reflector,
        nodes: Reflector,
        claims: Reflector,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._pods = pods
        self._nodes = nodes
        self._claims = claims
        self._clock = clock
        self.blocked: dict[str, None] = {}
        self.events = EventRecorder(client, "default-scheduler")

    async def reconcile(self, key: str) -> float | None:
        """Bind the pod `key`, or say why it cannot be bound."""
        pod = self._pods.objects.get(key)
        self.blocked.pop(key, None)
        if pod is None or not needs_node(pod) or pod["spec"].get("schedulingGates"):
            return None
        nodes = list(self._nodes.objects.values())
        missing = self._missing_claim(pod)
        placement = missing_claim(missing, len(nodes)) if missing else place(pod, nodes, self._pods.objects.values())
        if placement.node is None:
            self.blocked[key] = None
            await self._report(pod, placement.message)
            return None
        target = {"apiVersion": "v1", "kind": "Node", "name": placement.node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name_of(pod)}, "target": target}
        namespace = pod["metadata"]["namespace"]
        await self._client.request("POST", PODS.path(namespace, name_of(pod), "binding"), body=body)
        # Later decisions must count this pod although the watch has not told of the binding yet.
        bound = {**pod, "spec": {**pod["spec"], "nodeName": placement.node}}
        if self._pods.objects.get(key) is pod:
            self._pods.objects[key] = bound
        self._say(pod, "Normal", "Scheduled", f"Successfully assigned {key_of(pod)} to {placement.node}")
        return None

    def _missing_claim(self, pod: Object) -> str | None:
        for volume in pod["spec"].get("volumes") or ():
            name = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            if name and f"{pod['metadata']['namespace']}/{name}" not in self._claims.objects:
                return str(name)
        return None

    async def _report(self, pod: Object, message: str) -> None:
        current = condition_of(pod, "PodScheduled")
        if current is not None and current["status"] == "False" and current.get("message") == message:
            return
        moment = format_time(self._clock())
        same = current is not None and current["status"] == "False"
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "observedGeneration": pod["metadata"].get("generation", 1),
            "lastProbeTime": None,
            "lastTransitionTime": current["lastTransitionTime"] if current is not None and same else moment,
            "reason": "Unschedulable",
            "message": message,
        }
        self._say(pod, "Warning", "FailedScheduling", message)
        patched = await self._client.patch(
            PODS,
            name_of(pod),
            {"metadata": {"uid": pod["metadata"]["uid"]}, "status": {"conditions": [condition]}},
            pod["metadata"]["namespace"],
            subresource="status",
            content_type=STRATEGIC,
        )
        self._pods.record(patched)

    def _say(self, pod: Object, type: str, reason: str, message: str) -> None:
        action = "Binding" if reason == "Scheduled" else "Scheduling"
        self.events.record(pod, "v1", "Pod", type=type, reason=reason, message=message, action=action)


def needs_node(pod: Object) -> bool:
    """Whether the default scheduler has to place the pod."""
    return (
        not pod["spec"].get("nodeName")
        and pod["spec"].get("schedulerName", "default-scheduler") == "default-scheduler"
        and not is_deleted(pod)
        and not is_pod_finished(pod)
    )
