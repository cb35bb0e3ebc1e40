"""Changes that meet each other: edits in haste, deletions on the way, kinds and namespaces that go."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import yaml

from pagefleet_localcluster.client import DEPLOYMENTS, PODS, REPLICA_SETS, SERVICES, Resource
from support.operator_cluster import CRDS, LLMDS, ROOT, OperatorCluster, operator_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]
NAMESPACES = Resource("v1", "namespaces", "Namespace", namespaced=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OperatorCluster]:
    async with operator_cluster(tmp_path_factory.mktemp("races")) as running:
        yield running


async def settled(cluster: OperatorCluster, name: str, image: str, replicas: int) -> None:
    """So many replicas, all of this image, and a status that says so."""

    async def holds() -> bool:
        found = await cluster.llmd(name)
        pods = await cluster.pods(name)
        return (
            {pod["spec"]["containers"][0]["image"] for pod in pods} == {image}
            and len(pods) == replicas
            and found.get("status", {}).get("ready") == f"{replicas}/{replicas}"
            and found["status"]["observedGeneration"] == found["metadata"]["generation"]
        )

    await cluster.until(holds, f"{name}: {replicas} x {image}")


def image(text: str) -> dict[str, Any]:
    return {"spec": {"engine": {"image": text}}}


async def test_edits_faster_than_rollouts_end_with_the_last_one(cluster: OperatorCluster) -> None:
    await cluster.create({"replicas": 2, "engine": {"image": "first:0"}}, name="edited")
    await settled(cluster, "edited", "first:0", 2)
    for number in range(1, 21):
        await cluster.client.patch(LLMDS, "edited", image(f"next:{number}"), "default")
        await asyncio.sleep(0.1)
    await settled(cluster, "edited", "next:20", 2)
    assert "Degraded" not in await cluster.events("edited")
    await cluster.client.delete(LLMDS, "edited", "default")


async def test_deleted_in_the_middle_of_a_rollout_nothing_stays(cluster: OperatorCluster) -> None:
    await cluster.create({"replicas": 2, "engine": {"image": "old:1"}}, name="gone")
    await settled(cluster, "gone", "old:1", 2)
    cluster.node.downloads["gone"] = (0, 1)  # the new replica never starts
    await cluster.client.patch(LLMDS, "gone", image("new:2"), "default")

    async def under_way() -> bool:
        return len(await cluster.pods("gone")) == 3

    await cluster.until(under_way, "a third pod")
    await cluster.client.delete(LLMDS, "gone", "default")

    async def nothing_left() -> bool:
        kinds = (PODS, REPLICA_SETS, DEPLOYMENTS, SERVICES)
        selector = "pagefleet.dev/llmdeployment=gone"
        left = [await cluster.client.list(kind, "default", labelSelector=selector) for kind in kinds]
        return not any(listing["items"] for listing in left)

    await cluster.until(nothing_left, "all children collected")
    del cluster.node.downloads["gone"]


async def test_without_surge_the_only_replica_comes_back_when_its_successor_fails(cluster: OperatorCluster) -> None:
    """Where no device is free for a surge, the rollout ends the good replica before the new one has failed."""
    no_surge = {"rollout": {"maxSurge": 0, "maxUnavailable": 1}}
    await cluster.create({"replicas": 1, "engine": {"image": "good:1"}, **no_surge}, name="single")
    await settled(cluster, "single", "good:1", 1)
    cluster.node.crashes["single"] = "unknown option"

    async def is_back() -> bool:
        return {pod["spec"]["containers"][0]["image"] for pod in await cluster.pods("single")} == {"good:1"}

    await cluster.client.patch(LLMDS, "single", image("bad:2"), "default")
    await cluster.condition("Degraded", "True", name="single", reason="RolloutFailed")
    del cluster.node.crashes["single"]
    await cluster.until(is_back, "the good image")
    for pod in await cluster.pods("single"):  # it may have crashed with the others before it was healed
        await cluster.client.delete(PODS, pod["metadata"]["name"], "default", grace_seconds=0)
    await settled(cluster, "single", "good:1", 1)
    found = await cluster.condition("Degraded", "True", name="single", reason="RolloutFailed")
    assert "unknown option" in found["message"]
    await cluster.client.delete(LLMDS, "single", "default")


async def test_orphans_of_a_deployment_are_taken_over(cluster: OperatorCluster) -> None:
    await cluster.create({"replicas": 2, "engine": {"image": "same:1"}}, name="orphan")
    await settled(cluster, "orphan", "same:1", 2)
    before = {pod["metadata"]["name"] for pod in await cluster.pods("orphan")}
    await cluster.kubectl("delete", "deployment/orphan", "--cascade=orphan")

    async def is_back() -> bool:
        return await cluster.get(DEPLOYMENTS, "orphan") is not None

    await cluster.until(is_back, "a new Deployment")
    await settled(cluster, "orphan", "same:1", 2)
    assert {pod["metadata"]["name"] for pod in await cluster.pods("orphan")} == before, "no pod was replaced"
    await cluster.client.delete(LLMDS, "orphan", "default")


async def test_children_without_an_owner_are_taken_over_with_their_pods(cluster: OperatorCluster) -> None:
    """After an orphan deletion the name was taken for ever, and a child whose owner was edited out stayed so."""
    await cluster.create({"replicas": 2}, name="orphaned")
    await cluster.condition("Available", "True", name="orphaned")
    before = {pod["metadata"]["uid"] for pod in await cluster.pods("orphaned")}
    await cluster.kubectl("delete", "llmd", "orphaned", "--cascade=orphan")
    created = await cluster.create({"replicas": 2}, name="orphaned")

    async def owned_by(resource: Resource) -> bool:
        child = await cluster.get(resource, "orphaned")
        references = (child or {}).get("metadata", {}).get("ownerReferences", [])
        return [item["uid"] for item in references] == [created["metadata"]["uid"]]

    await cluster.until(lambda: owned_by(DEPLOYMENTS), "the Deployment is the new object's")
    await cluster.until(lambda: owned_by(SERVICES), "and the Service")
    await cluster.condition("Available", "True", name="orphaned")
    await cluster.client.patch(SERVICES, "orphaned", {"metadata": {"ownerReferences": None}}, "default")
    await cluster.until(lambda: owned_by(SERVICES), "an owner that was edited out is put back")
    assert {pod["metadata"]["uid"] for pod in await cluster.pods("orphaned")} == before
    await cluster.condition("Degraded", "False", name="orphaned")
    await cluster.client.delete(LLMDS, "orphaned", "default")


async def test_a_status_that_somebody_edits_is_again_what_is_so(cluster: OperatorCluster) -> None:
    await cluster.create({"replicas": 1, "autoscaling": {"maxReplicas": 3}}, name="told")
    await cluster.condition("Available", "True", name="told")
    await cluster.condition("Progressing", "False", name="told")
    lie = {"type": "Available", "status": "False", "reason": "Made", "message": "up", "observedGeneration": 9}
    lie["lastTransitionTime"] = "2020-01-01T00:00:00Z"
    decision = {"time": "2020-01-01T00:00:00Z", "from": 1, "to": 9, "inputs": "", "reason": "KVBlocks"}
    numbers = {"ready": "9/9", "readyReplicas": 9, "pods": None, "kvBlocks": None}
    for status in (
        None,
        {"conditions": [lie]},
        numbers,
        {"phase": "Stopped", "reason": "Made", "rollout": {"failedTemplateHash": "none", "message": "made up"}},
        {"autoscaling": {"desiredReplicas": 9, "decisions": [decision]}},
    ):
        await cluster.client.patch(LLMDS, "told", {"status": status}, "default", subresource="status")

        async def is_true() -> bool:
            found = await cluster.llmd("told")
            said = found.get("status", {})
            conditions = {item["type"]: item["status"] for item in said.get("conditions", [])}
            return (
                (said.get("ready"), said.get("readyReplicas"), said.get("phase")) == ("1/1", 1, "Available")
                and (conditions.get("Available"), conditions.get("Degraded")) == ("True", "False")
                and [row["state"] for row in said.get("pods", [])] == ["Ready"]
                and said["autoscaling"]["desiredReplicas"] == 1
                and "failedTemplateHash" not in said.get("rollout", {})
                and found["spec"]["replicas"] == 1
            )

        await cluster.until(is_true, f"the status after {status}")
    await cluster.client.delete(LLMDS, "told", "default")


async def test_foreign_finalizers_are_waited_for_in_peace(cluster: OperatorCluster) -> None:
    """Of a child: it cannot be made again before it is gone. Of the object: its children stay until it goes."""
    await cluster.create({"replicas": 1}, name="held")
    await cluster.condition("Available", "True", name="held")
    hold = {"metadata": {"finalizers": ["example.com/wait"]}}
    await cluster.client.patch(DEPLOYMENTS, "held", hold, "default")
    await cluster.client.delete(DEPLOYMENTS, "held", "default")

    async def peace() -> bool:
        before = len(cluster.proxy.writes())
        await cluster.scraped("held", 3)
        return not [seen for seen in cluster.proxy.writes()[before:] if "held" in seen.path]

    await cluster.until(peace, "three rounds without a write, once its status has had its turn", seconds=30)
    await cluster.client.patch(DEPLOYMENTS, "held", {"metadata": {"finalizers": None}}, "default")

    async def is_new() -> bool:
        deployment = await cluster.get(DEPLOYMENTS, "held")
        return deployment is not None and "deletionTimestamp" not in deployment["metadata"]

    await cluster.until(is_new, "another Deployment")
    await cluster.condition("Available", "True", name="held")
    await cluster.client.patch(LLMDS, "held", hold, "default")
    await cluster.client.delete(LLMDS, "held", "default")
    await cluster.client.patch(LLMDS, "held", {"metadata": {"finalizers": None}}, "default")

    async def is_gone() -> bool:
        return not await cluster.pods("held") and await cluster.get(DEPLOYMENTS, "held") is None

    await cluster.until(is_gone, "nothing is left")


async def test_objects_of_an_older_crd_are_served_and_a_newer_one_is_taken_on_the_way(
    cluster: OperatorCluster,
) -> None:
    """Fields and rules come with a release; objects that were there before have none of the defaults."""
    crd = yaml.safe_load((ROOT / "crds" / "llmdeployment.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    older = yaml.safe_load((ROOT / "crds" / "llmdeployment.yaml").read_text())
    spec = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for name in (
        "drain",
        "startup",
        "rollout",
        "disruptionBudget",
        "service",
        "networkPolicy",
        "monitoring",
        "placement",
    ):
        del spec["properties"][name]
    spec.pop("x-kubernetes-validations")
    live = await cluster.client.get(CRDS, crd["metadata"]["name"])
    await cluster.client.replace(CRDS, {**live, "spec": older["spec"]})
    await cluster.create({"engine": {"image": "old:1"}}, name="elder")
    await settled(cluster, "elder", "old:1", 1)
    before = {pod["metadata"]["name"] for pod in await cluster.pods("elder")}
    live = await cluster.client.get(CRDS, crd["metadata"]["name"])
    await cluster.client.replace(CRDS, {**live, "spec": crd["spec"]})
    await cluster.client.patch(LLMDS, "elder", {"spec": {"service": {"port": 81}}}, "default")

    async def follows() -> bool:
        service = await cluster.get(SERVICES, "elder")
        return service is not None and service["spec"]["ports"][0]["port"] == 81

    await cluster.until(follows, "the new field")
    assert "drain" in schema["spec"]["properties"]
    assert {pod["metadata"]["name"] for pod in await cluster.pods("elder")} == before, "defaults roll nothing out"
    await cluster.client.delete(LLMDS, "elder", "default")
