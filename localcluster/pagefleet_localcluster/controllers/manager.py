"""Runs all controllers over one set of reflectors."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from pagefleet_localcluster.client import (
    CLAIMS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    ENDPOINT_SLICES,
    NODES,
    PODS,
    REPLICA_SETS,
    RESOURCE_QUOTAS,
    SERVICES,
    Client,
    Resource,
)
from pagefleet_localcluster.controllers.claims import ClaimController
from pagefleet_localcluster.controllers.deployment import DeploymentController
from pagefleet_localcluster.controllers.disruption import DisruptionController
from pagefleet_localcluster.controllers.endpoints import EndpointsController
from pagefleet_localcluster.controllers.node_lifecycle import NodeLifecycleController
from pagefleet_localcluster.controllers.quota import QuotaController
from pagefleet_localcluster.controllers.replica_set import ReplicaSetController
from pagefleet_localcluster.controllers.scheduler import Scheduler, needs_node
from pagefleet_localcluster.controllers.service_proxy import ServiceProxy
from pagefleet_localcluster.controllers.work_queue import WorkQueue
from pagefleet_localcluster.objects import Object, controller_of, is_pod_finished, key_of, labels_of, selector_matches
from pagefleet_localcluster.reflector import Listener, Reflector


class ControllerManager:
    """Wires watches to queues: which change of which object makes which key be looked at again."""

    def __init__(
        self,
        client: Client,
        *,
        scheduler_client: Client | None = None,
        claims_directory: Path,
        rng: random.Random,
        node_grace_seconds: float = 40.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._reflectors: list[Reflector] = []
        self._queues: list[WorkQueue] = []

        def reflect(resource: Resource) -> Reflector:
            self._reflectors.append(Reflector(client, resource))
            return self._reflectors[-1]

        def queue(name: str, reconcile: Callable[[str], Awaitable[float | None]]) -> WorkQueue:
            self._queues.append(WorkQueue(name, reconcile))
            return self._queues[-1]

        self.deployments = reflect(DEPLOYMENTS)
        self.replica_sets = reflect(REPLICA_SETS)
        self.pods = reflect(PODS)
        self.services = reflect(SERVICES)
        self.nodes = reflect(NODES)
        self.budgets = reflect(DISRUPTION_BUDGETS)
        self.quotas = reflect(RESOURCE_QUOTAS)
        slices, claims = reflect(ENDPOINT_SLICES), reflect(CLAIMS)

        deployment = DeploymentController(client, self.deployments, self.replica_sets, self.pods, clock)
        replica_set = ReplicaSetController(client, self.replica_sets, self.pods, clock)
        scheduler = self._scheduler = Scheduler(scheduler_client or client, self.pods, self.nodes, claims, clock)
        endpoints = EndpointsController(client, self.services, self.pods, slices)
        budget = DisruptionController(client, self.budgets, self.pods, self.replica_sets, self.deployments, clock)
        node = NodeLifecycleController(client, self.nodes, self.pods, grace_seconds=node_grace_seconds, clock=clock)
        quota = QuotaController(client, self.quotas, self.pods)
        claim = ClaimController(client, claims, claims_directory)
        self._proxy = ServiceProxy(client, self.services, self.pods, rng=rng)

        self._deployment_queue = queue("deployment", deployment.reconcile)
        self._replica_set_queue = queue("replica set", replica_set.reconcile)
        self._scheduler_queue = queue("scheduler", scheduler.reconcile)
        self._endpoints_queue = queue("endpoints", endpoints.reconcile)
        self._budget_queue = queue("disruption budget", budget.reconcile)
        self._node_queue = queue("node", node.reconcile)
        self._proxy_queue = queue("service proxy", self._proxy.reconcile)
        claim_queue = queue("claim", claim.reconcile)
        self._quota_queue = queue("quota", quota.reconcile)
        self._recorders = [c.events for c in (deployment, replica_set, scheduler, self._proxy)]

        self.deployments.listeners += [_each(self._deployment_queue), self._wake_budgets]
        self.replica_sets.listeners += [_each(self._replica_set_queue), self._replica_set_changed, self._wake_budgets]
        self.pods.listeners += [self._pod_changed, self._wake_budgets]
        self.services.listeners += [_each(self._endpoints_queue), _each(self._proxy_queue)]
        self.nodes.listeners += [_each(self._node_queue), self._retry_blocked]
        self.budgets.listeners += [_each(self._budget_queue)]
        claims.listeners += [_each(claim_queue), self._retry_blocked]
        self.quotas.listeners += [_each(self._quota_queue)]

    async def run(self) -> None:
        """Run until cancelled: reflectors first, controllers once every collection has been listed."""
        try:
            async with asyncio.TaskGroup() as group:
                for reflector in self._reflectors:
                    group.create_task(reflector.run())
                for recorder in self._recorders:
                    group.create_task(recorder.run())
                for reflector in self._reflectors:
                    await reflector.synced.wait()
                for work in self._queues:
                    group.create_task(work.run())
        finally:
            await self._proxy.close()

    def _replica_set_changed(self, old: Object | None, new: Object | None) -> None:
        _wake_owner(self._deployment_queue, "Deployment", old, new)

    def _pod_changed(self, old: Object | None, new: Object | None) -> None:
        _wake_owner(self._replica_set_queue, "ReplicaSet", old, new)
        pod = new if new is not None else old
        assert pod is not None
        if new is not None and controller_of(new) is None:
            self._wake_adopters(new)
        if new is None or is_pod_finished(new):
            self._retry_blocked(old, new)
            self._wake_grandparent(pod)
        if new is not None and needs_node(new) and (old is None or key_of(new) not in self._scheduler.blocked):
            self._scheduler_queue.add(key_of(new))
        elif new is None:
            self._scheduler_queue.add(key_of(pod))
        node = pod["spec"].get("nodeName")
        if node and node not in self.nodes.objects and new is not None:
            self._node_queue.add(node)
        for quota in self.quotas.objects.values():
            if quota["metadata"]["namespace"] == pod["metadata"]["namespace"]:
                self._quota_queue.add(key_of(quota))
        for service in self.services.objects.values():
            selector = service["spec"].get("selector")
            if service["metadata"]["namespace"] != pod["metadata"]["namespace"] or not selector:
                continue
            if any(obj is not None and selector.items() <= labels_of(obj).items() for obj in (old, new)):
                self._endpoints_queue.add(key_of(service))
                self._proxy_queue.add(key_of(service))

    def _wake_adopters(self, orphan: Object) -> None:
        for replica_set in self.replica_sets.objects.values():
            same = replica_set["metadata"]["namespace"] == orphan["metadata"]["namespace"]
            if same and selector_matches(replica_set["spec"]["selector"], labels_of(orphan)):
                self._replica_set_queue.add(key_of(replica_set))

    def _wake_grandparent(self, pod: Object) -> None:
        """A Deployment with strategy Recreate waits until old pods are gone."""
        reference = controller_of(pod)
        if reference is not None and reference["kind"] == "ReplicaSet":
            parent = self.replica_sets.objects.get(f"{pod['metadata']['namespace']}/{reference['name']}")
            if parent is not None:
                _wake_owner(self._deployment_queue, "Deployment", parent)

    def _retry_blocked(self, old: Object | None, new: Object | None) -> None:
        for key in self._scheduler.blocked:
            self._scheduler_queue.add(key)

    def _wake_budgets(self, old: Object | None, new: Object | None) -> None:
        """A pod, or a Deployment or ReplicaSet whose pods a budget counts, has changed."""
        changed = [obj for obj in (old, new) if obj is not None]
        namespace = changed[0]["metadata"]["namespace"]
        labels = [labels_of(obj["spec"].get("template", obj)) for obj in changed]
        for budget in self.budgets.objects.values():
            selector = budget["spec"].get("selector")
            if budget["metadata"]["namespace"] == namespace and any(selector_matches(selector, one) for one in labels):
                self._budget_queue.add(key_of(budget))


def _each(queue: WorkQueue) -> Listener:
    """Every change of an object queues its own key."""

    def changed(old: Object | None, new: Object | None) -> None:
        obj = new if new is not None else old
        assert obj is not None
        queue.add(key_of(obj))

    return changed


def _wake_owner(queue: WorkQueue, kind: str, *objects: Object | None) -> None:
    """Queue the controlling owner of this kind."""
    for obj in objects:
        reference = controller_of(obj) if obj is not None else None
        if obj is not None and reference is not None and reference["kind"] == kind:
            queue.add(f"{obj['metadata']['namespace']}/{reference['name']}")
