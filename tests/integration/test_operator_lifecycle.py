"""The real operator process against the embedded API and controllers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pagefleet_localcluster.client import DEPLOYMENTS, PODS, SERVICES, ApiError
from support.operator_cluster import LLMDS, OperatorCluster, operator_cluster

pytestmark = pytest.mark.e2e
FAST = {"scaleDown": {"stabilizationWindowSeconds": 3}}


async def pods(cluster: OperatorCluster) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = (await cluster.client.list(PODS, "default"))["items"]
    return [item for item in items if not item["metadata"].get("deletionTimestamp")]


async def test_from_apply_to_available_with_live_load(tmp_path: Path) -> None:
    async with operator_cluster(tmp_path) as cluster:
        cluster.node.load = {"used": 61, "total": 100, "running": 3, "waiting": 2, "waiting_blocks": 7}
        await cluster.create({"replicas": 2})
        await cluster.condition("Available", "True")

        async def loaded() -> bool:
            status = (await cluster.llmd())["status"]
            return bool(status.get("kvBlocks", {}).get("summary") == "122/200" and status["ready"] == "2/2")

        await cluster.until(loaded, "load in status")
        status = (await cluster.llmd())["status"]
        assert status["kvBlocks"]["occupancy"] == "61%"
        assert status["kvBlocks"]["waiting"] == 14
        assert status["requests"] == {"running": 6, "waiting": 4}
        assert status["model"] == "chat"
        assert (status["replicas"], status["readyReplicas"]) == (2, 2)
        assert status["selector"] == "app.kubernetes.io/name=pagefleet-server,pagefleet.dev/llmdeployment=chat"
        assert [row["state"] for row in status["pods"]] == ["Ready", "Ready"]
        await cluster.condition("Progressing", "False")
        assert (await cluster.llmd())["status"]["phase"] == "Available"
        service = await cluster.get(SERVICES)
        assert service is not None
        assert service["spec"]["ports"][0]["targetPort"] == "http"


async def test_nothing_of_kopf_is_written_and_nothing_at_all_at_rest(tmp_path: Path) -> None:
    async with operator_cluster(tmp_path) as cluster:
        await cluster.create({"autoscaling": {"maxReplicas": 3}})
        await cluster.condition("ScalingActive", "True")
        await cluster.condition("Progressing", "False")
        await asyncio.sleep(5)  # two scrape rounds: whatever was on its way has been written
        before = len(cluster.proxy.writes())
        await asyncio.sleep(6)  # three more rounds of a resting fleet
        assert cluster.proxy.writes()[before:] == []
        found = await cluster.llmd()
        assert "finalizers" not in found["metadata"]
        assert "annotations" not in found["metadata"]


async def test_drift_is_repaired_and_said(tmp_path: Path) -> None:
    async with operator_cluster(tmp_path) as cluster:
        await cluster.create({})
        await cluster.condition("Available", "True")
        await cluster.client.patch(DEPLOYMENTS, "chat", {"spec": {"replicas": 3}}, "default")

        async def repaired() -> bool:
            deployment = await cluster.get(DEPLOYMENTS)
            return deployment is not None and deployment["spec"]["replicas"] == 1 and len(await pods(cluster)) == 1

        await cluster.until(repaired, "one replica again")
        await cluster.client.patch(SERVICES, "chat", {"spec": {"selector": {"other": "label"}}}, "default")

        async def service_repaired() -> bool:
            service = await cluster.get(SERVICES)
            return service is not None and "pagefleet.dev/llmdeployment" in service["spec"]["selector"]

        await cluster.until(service_repaired, "selector again")
        reasons = {event["reason"] for event in await cluster.events()}
        assert "DriftRepaired" in reasons
        await cluster.client.delete(DEPLOYMENTS, "chat", "default")
        await cluster.until(repaired, "a new Deployment")


async def test_scales_out_on_need_and_in_after_the_window(tmp_path: Path) -> None:
    async with operator_cluster(tmp_path) as cluster:
        await cluster.create({"autoscaling": {"maxReplicas": 4, "behavior": FAST}})
        await cluster.condition("ScalingActive", "True")
        cluster.node.load = {"used": 100, "waiting_blocks": 60, "running": 5, "waiting": 3}

        async def grown() -> bool:
            return (await cluster.llmd())["status"].get("ready") == "4/4"

        await cluster.until(grown, "four replicas")  # two full pods ask for more still
        names = {pod["metadata"]["name"] for pod in await pods(cluster)}
        busy = sorted(names)[0]
        cluster.node.load = {}
        cluster.node.loads = {busy: {"used": 5, "running": 1}}

        async def shrunk() -> bool:
            return (await cluster.llmd())["status"].get("ready") == "1/1" and len(await pods(cluster)) == 1

        await cluster.until(shrunk, "one replica")
        assert [pod["metadata"]["name"] for pod in await pods(cluster)] == [busy], "the busiest pod stays"
        status = (await cluster.llmd())["status"]
        changes = [(item["from"], item["to"]) for item in status["autoscaling"]["decisions"]]
        assert changes[0][0] == 1
        assert changes[-1][1] == 1
        assert status["autoscaling"]["lastScaleTime"] == status["autoscaling"]["decisions"][-1]["time"]
        reasons = [event["reason"] for event in await cluster.events()]
        assert "ScaledUp" in reasons
        assert "ScaledDown" in reasons


async def test_a_crashing_model_is_degraded_with_its_message_and_others_are_served(tmp_path: Path) -> None:
    async with operator_cluster(tmp_path) as cluster:
        cluster.node.crash = "model file /m does not exist"
        await cluster.create({}, name="broken")
        broken = await cluster.condition("Degraded", "True", name="broken", reason="CrashLoop")
        assert "model file /m does not exist" in broken["message"]
        cluster.node.crash = None
        await cluster.create({}, name="fine")
        await cluster.condition("Available", "True", name="fine")
        found = await cluster.llmd("broken")
        assert (found["status"]["phase"], found["status"]["reason"]) == ("Degraded", "CrashLoop")


async def test_an_object_of_our_name_that_is_not_ours_is_never_touched(tmp_path: Path) -> None:
    async with operator_cluster(tmp_path) as cluster:
        theirs = {
            "metadata": {"name": "chat", "namespace": "default"},
            "spec": {"ports": [{"port": 9}], "selector": {"app": "theirs"}},
        }
        created = await cluster.client.create(SERVICES, theirs, "default")
        await cluster.create({})
        conflict = await cluster.condition("Degraded", "True", reason="NameConflict")
        assert "Service chat" in conflict["message"]
        assert await cluster.get(DEPLOYMENTS) is None
        same = await cluster.get(SERVICES)
        assert same is not None
        assert same["metadata"]["resourceVersion"] == created["metadata"]["resourceVersion"]
        await cluster.client.delete(SERVICES, "chat", "default")
        await cluster.condition("Available", "True", seconds=30.0)


async def test_deletion_needs_no_operator(tmp_path: Path) -> None:
    async with operator_cluster(tmp_path) as cluster:
        await cluster.create({})
        await cluster.condition("Available", "True")
        await cluster.operator.stop()
        await cluster.client.delete(LLMDS, "chat", "default")

        async def gone() -> bool:
            return await cluster.get(DEPLOYMENTS) is None and not (await cluster.client.list(PODS, "default"))["items"]

        await cluster.until(gone, "children collected")


async def test_an_invalid_object_is_refused_with_the_field(tmp_path: Path) -> None:
    async with operator_cluster(tmp_path, start=False) as cluster:
        with pytest.raises(ApiError, match=r"minReplicas must not be above"):
            await cluster.create({"autoscaling": {"minReplicas": 3, "maxReplicas": 2}})


async def test_the_operator_waits_for_its_crd_and_ends_on_a_signal(tmp_path: Path) -> None:
    async with operator_cluster(tmp_path) as cluster:
        await cluster.create({})
        await cluster.condition("Available", "True")
        assert await cluster.operator.stop() == 0
