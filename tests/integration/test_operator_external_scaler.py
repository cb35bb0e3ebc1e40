"""An HPA or KEDA in the operator's place: what either does to the scale subresource, and what becomes of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.operator_cluster import OperatorCluster, operator_cluster

DRY_RUN = {"autoscaling": {"maxReplicas": 2, "mode": "DryRun"}}


@pytest.mark.parametrize("spec", [{}, DRY_RUN], ids=["without autoscaling", "dry run"])
async def test_its_count_is_obeyed_and_its_selector_finds_the_pods(spec: dict[str, Any], tmp_path: Path) -> None:
    """It reads the scale, selects the pods by it, and puts it back with another count."""
    async with operator_cluster(tmp_path) as cluster:
        await cluster.create(spec, name="chat")
        await cluster.condition("Available", "True", name="chat")
        for count in (3, 2):
            await put_scale(cluster, tmp_path, count)

            async def obeyed(count: int = count) -> bool:
                return bool((await scale_of(cluster))["status"].get("replicas") == count)

            await cluster.until(obeyed, f"{count} replicas", seconds=30)
            found = await scale_of(cluster)
            selected = await cluster.kubectl("get", "pods", "-l", found["status"]["selector"], "-o", "name")
            assert len(selected.split()) == count
        assert "ReplicasOverwritten" not in await cluster.events("chat")


async def test_beside_a_managed_one_it_is_overwritten_and_told_so(tmp_path: Path) -> None:
    async with operator_cluster(tmp_path) as cluster:
        await cluster.create({"autoscaling": {"maxReplicas": 2}}, name="chat")
        await cluster.condition("ScalingActive", "True", name="chat")
        await put_scale(cluster, tmp_path, 4)

        async def told() -> bool:
            return "ReplicasOverwritten" in await cluster.events("chat")

        await cluster.until(told, "who set the replicas is told", seconds=30)
        assert (await cluster.llmd("chat"))["spec"]["replicas"] <= 2


PATH = "/apis/pagefleet.dev/v1alpha1/namespaces/default/llmdeployments/chat/scale"


async def scale_of(cluster: OperatorCluster) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await cluster.kubectl("get", "--raw", PATH))
    assert (found["apiVersion"], found["kind"]) == ("autoscaling/v1", "Scale")
    return found


async def put_scale(cluster: OperatorCluster, folder: Path, replicas: int) -> None:
    wanted = {**await scale_of(cluster), "spec": {"replicas": replicas}}
    (folder / "scale.json").write_text(json.dumps(wanted))
    await cluster.kubectl("replace", "--raw", PATH, "-f", str(folder / "scale.json"))
