"""Carries out deployment plans: ReplicaSets, revisions, status and events."""

import time
from collections.abc import Callable

from pagefleet_localcluster.client import DEPLOYMENTS, REPLICA_SETS, ApiError, Client
from pagefleet_localcluster.controllers.deployment_plan import (
    REVISION,
    DeploymentPlan,
    Resize,
    find_new,
    plan_deployment,
)
from pagefleet_localcluster.event_recorder import EventRecorder
from pagefleet_localcluster.objects import (
    Object,
    annotations_of,
    controller_of,
    is_controlled_by,
    is_deleted,
    is_pod_finished,
    key_of,
    labels_of,
    name_of,
    owner_reference,
    selector_matches,
)
from pagefleet_localcluster.reflector import Reflector


class DeploymentController:
    """Reconciles one Deployment at a time from the reflectors' copies."""

    def __init__(
        self,
        client: Client,
        deployments: Reflector,
        replica_sets: Reflector,
        pods: Reflector,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._deployments = deployments
        self._replica_sets = replica_sets
        self._pods = pods
        self._clock = clock
        self.events = EventRecorder(client, "deployment-controller")

    async def reconcile(self, key: str) -> float | None:
        """One synchronisation of the Deployment `key`."""
        deployment = self._deployments.objects.get(key)
        if deployment is None:
            return None
        namespace = deployment["metadata"]["namespace"]
        if not is_deleted(deployment):
            await self._adopt(deployment, namespace)
        mine = [
            rs
            for rs in self._replica_sets.objects.values()
            if rs["metadata"]["namespace"] == namespace and is_controlled_by(rs, deployment)
        ]
        new = find_new(deployment, mine)
        old = [rs for rs in mine if rs is not new]
        old_pods = sum(
            1
            for pod in self._pods.objects.values()
            if not is_pod_finished(pod) and any(is_controlled_by(pod, rs) for rs in old)
        )
        plan = plan_deployment(deployment, mine, old_pods, self._clock())
        await self._carry_out(deployment, namespace, plan)
        return plan.requeue_seconds

    async def _adopt(self, deployment: Object, namespace: str) -> None:
        """Take over matching ReplicaSets without a controller: those of a Deployment that was deleted without them."""
        selector = deployment["spec"]["selector"]
        for rs in list(self._replica_sets.objects.values()):
            if rs["metadata"]["namespace"] != namespace or controller_of(rs) is not None or is_deleted(rs):
                continue
            if selector_matches(selector, labels_of(rs)):
                others = rs["metadata"].get("ownerReferences") or ()
                owners = [*others, owner_reference(deployment, "apps/v1", "Deployment")]
                patch = {"metadata": {"ownerReferences": owners, "uid": rs["metadata"]["uid"]}}
                self._replica_sets.record(await self._client.patch(REPLICA_SETS, name_of(rs), patch, namespace))

    async def _carry_out(self, deployment: Object, namespace: str, plan: DeploymentPlan) -> None:
        if plan.create is not None and not await self._create(deployment, namespace, plan.create):
            return
        for resize in plan.resize:
            await self._resize(deployment, namespace, resize)
        for name in plan.delete:
            await self._client.delete(REPLICA_SETS, name, namespace)
        annotations = annotations_of(deployment)
        if plan.revision is not None:
            annotations = {**annotations, REVISION: plan.revision}
        if plan.status != deployment.get("status") or annotations != annotations_of(deployment):
            # One write for both, as Kubernetes' controller does: the status of a Deployment takes annotations along.
            latest = self._deployments.objects.get(key_of(deployment), deployment)
            metadata = {**latest["metadata"], "annotations": annotations}
            body = {**latest, "metadata": metadata, "status": plan.status}
            self._deployments.record(await self._client.replace(DEPLOYMENTS, body, "status"))

    async def _create(self, deployment: Object, namespace: str, body: Object) -> bool:
        try:
            created = await self._client.create(REPLICA_SETS, body, namespace)
        except ApiError as error:
            if error.code != 409:
                raise
            await self._settle_name(deployment, namespace, name_of(body))
            return False
        self._replica_sets.record(created)
        if size := body["spec"]["replicas"]:
            self._say_scaled(deployment, name_of(body), 0, size)
        return True

    async def _settle_name(self, deployment: Object, namespace: str, name: str) -> None:
        """The wanted name is taken: by our own ReplicaSet that we had not seen, or by a hash collision."""
        existing = await self._client.get(REPLICA_SETS, name, namespace)
        if is_controlled_by(existing, deployment) and find_new(deployment, [existing]) is not None:
            self._replica_sets.record(existing)
            return
        collisions = (deployment.get("status") or {}).get("collisionCount") or 0
        status = {**(deployment.get("status") or {}), "collisionCount": collisions + 1}
        body = {**deployment, "status": status}
        self._deployments.record(await self._client.replace(DEPLOYMENTS, body, "status"))

    async def _resize(self, deployment: Object, namespace: str, resize: Resize) -> None:
        patch: Object = {"spec": {"replicas": resize.after}}
        if resize.annotations:
            patch["metadata"] = {"annotations": resize.annotations}
        self._replica_sets.record(await self._client.patch(REPLICA_SETS, resize.name, patch, namespace))
        if resize.after != resize.before:
            self._say_scaled(deployment, resize.name, resize.before, resize.after)

    def _say_scaled(self, deployment: Object, name: str, before: int, after: int) -> None:
        direction = "up" if after > before else "down"
        message = f"Scaled {direction} replica set {name} from {before} to {after}"
        self.events.record(
            deployment, "apps/v1", "Deployment", type="Normal", reason="ScalingReplicaSet", message=message
        )
