"""What the autoscaler has learnt is in the object's status, and the next operator goes on with it."""

import signal
from pathlib import Path
from typing import Any

import pytest

from support.operator_cluster import LLMDS, OperatorCluster, operator_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio]
READY, BUSY = "ready", "busy"
STANDING = {
    "replicas": 3,
    "seenReplicaMinutes": 600,
    "longestQuietMinutes": 90,
    "late": [{"replicas": 1, "permille": 300}, {"replicas": 2, "permille": 100}],
}
FULL = {"used": 100, "waiting_blocks": 60, "running": 5, "waiting": 3}
OLD_QUEUE = {"used": 70, "waiting_blocks": 1280, "running": 9, "waiting": 128, "oldest": 600}
"""128 requests have waited for ten minutes: no new replica could take them over."""


async def test_a_killed_operator_forgets_neither_what_must_stand_ready_nor_that_a_queue_is_old(tmp_path: Path) -> None:
    async with operator_cluster(tmp_path, "--lease-seconds", "5", "--listen", "127.0.0.1:0", start=False) as cluster:
        quick = {"scaleDown": {"stabilizationWindowSeconds": 1}}
        slo = {"timeToFirstTokenMilliseconds": 500}
        await create(cluster, READY, {"maxReplicas": 5, "behavior": quick, "slo": slo}, {"standing": STANDING})
        await create(cluster, BUSY, {"maxReplicas": 64, "behavior": quick}, {"turnoverMilliseconds": 10000})
        cluster.node.loads[BUSY] = OLD_QUEUE
        await cluster.operator.start()
        await replicas(cluster, 3)
        await cluster.operator.stop(signal.SIGKILL)
        await cluster.operator.start()
        cluster.node.loads[READY] = FULL
        await replicas(cluster, 5)
        cluster.node.loads[READY] = {}
        await replicas(cluster, 3)
        status = (await cluster.llmd(READY))["status"]["autoscaling"]
        assert status["history"]["standing"] == STANDING
        assert min(change["to"] for change in status["decisions"]) == 3, "it never went below what must stand ready"
        assert status["decisions"][0]["reason"] == "Standing"
        busy = await cluster.llmd(BUSY)
        assert busy["spec"]["replicas"] == 1
        assert busy["status"]["autoscaling"]["history"]["turnoverMilliseconds"] == 10000


async def create(cluster: OperatorCluster, name: str, autoscaling: dict[str, Any], history: dict[str, Any]) -> None:
    """An LLMDeployment as an earlier operator left it."""
    await cluster.create({"autoscaling": autoscaling}, name=name)
    status = {"autoscaling": {"history": history}}
    await cluster.client.patch(LLMDS, name, {"status": status}, "default", subresource="status")


async def replicas(cluster: OperatorCluster, want: int) -> None:
    async def check() -> bool:
        pods = await cluster.pods(READY)
        wanted: int = (await cluster.llmd(READY))["spec"]["replicas"]
        return len(pods) == wanted == want

    await cluster.until(check, f"{want} replicas", seconds=60)
