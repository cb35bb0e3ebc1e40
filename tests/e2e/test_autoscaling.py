"""The operator's decisions on a running cluster: phases of load, objectives, a budget of devices.

The operator is the real process on the real API; pods are endpoints that say what a test wants them to say. With real
servers: test_main_job.py (a load scales out and in) and test_autoscaling_streams.py."""

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from pagefleet_localcluster.client import NODES, PODS
from support.operator_cluster import LLMDS, OperatorCluster, operator_cluster
from support.operator_objects import metrics_text

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]
Json = dict[str, Any]
WINDOW_SECONDS = 4
FAST = {"scaleDown": {"stabilizationWindowSeconds": WINDOW_SECONDS}}
FULL: Json = {"used": 100, "waiting_blocks": 60, "running": 5, "waiting": 3, "oldest": 2}
BUSY: Json = {"used": 30, "running": 3, "waiting": 1, "oldest": 2}
"""Requests wait, but few, and blocks are free: neither occupancy nor the queue asks for more."""
BOUNDS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


@dataclass
class Served:
    """What every pod of one LLMDeployment says, and how often it was asked."""

    load: Json = field(default_factory=dict)
    first_token_seconds: float = 0.04
    requests_per_scrape: int = 0
    """New requests with that time to first token, seen by each scrape."""
    num_scrapes: int = 0
    _counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_SECONDS) + 1))

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.num_scrapes += 1
        for index, bound in enumerate((*BOUNDS_SECONDS, float("inf"))):
            if self.first_token_seconds <= bound:
                self._counts[index] += self.requests_per_scrape
        name = "vllm:time_to_first_token_seconds"
        labels = [str(bound) for bound in BOUNDS_SECONDS] + ["+Inf"]
        lines = [f"# TYPE {name} histogram"]
        lines += [f'{name}_bucket{{le="{le}"}} {count}' for le, count in zip(labels, self._counts, strict=True)]
        lines += [f"{name}_sum 1", f"{name}_count {self._counts[-1]}", ""]
        return web.Response(text=metrics_text(**self.load) + "\n".join(lines))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OperatorCluster]:
    async with operator_cluster(tmp_path_factory.mktemp("autoscaling"), "--device-budget", "default=3") as running:
        offered = {"cpu": "64", "memory": "64Gi", "pods": "500", "nvidia.com/gpu": "8"}
        status = {"status": {"capacity": offered, "allocatable": offered}}
        await running.client.patch(NODES, "stub", status, subresource="status")
        yield running


async def serve(cluster: OperatorCluster, name: str, spec: Json, **load: Any) -> Served:
    served = Served(**load)
    cluster.node.answers[name] = served.answer
    await cluster.create(spec, name=name)
    await cluster.condition("ScalingActive", "True", name=name)
    return served


async def asked(cluster: OperatorCluster, served: Served, times: int) -> None:
    """So many more scrapes: rounds, where there is one pod."""
    before = served.num_scrapes

    async def holds() -> bool:
        return served.num_scrapes >= before + times

    await cluster.until(holds, f"{times} more scrapes")


async def wanted(cluster: OperatorCluster, name: str, replicas: int, *, ready: bool = True) -> None:
    async def holds() -> bool:
        found = await cluster.llmd(name)
        settled = found["spec"]["replicas"] == replicas
        return settled and (not ready or found["status"].get("ready") == f"{replicas}/{replicas}")

    await cluster.until(holds, f"{name} has {replicas} replicas")


async def test_three_phases_grow_within_two_rounds_and_shrink_after_the_window(cluster: OperatorCluster) -> None:
    served = await serve(cluster, "phases", {"autoscaling": {"maxReplicas": 2, "behavior": FAST}})
    await asked(cluster, served, 2)  # idle: a whole round
    assert (await cluster.llmd("phases"))["spec"]["replicas"] == 1
    served.load, asked_before = FULL, served.num_scrapes
    await wanted(cluster, "phases", 2, ready=False)
    assert served.num_scrapes - asked_before <= 2, "the need was seen more than twice before the fleet grew"
    await wanted(cluster, "phases", 2)
    served.load = {}
    idle_at = datetime.datetime.now(datetime.UTC)
    await wanted(cluster, "phases", 1)
    shrank = (await cluster.llmd("phases"))["status"]["autoscaling"]["decisions"][-1]
    assert (shrank["from"], shrank["to"]) == (2, 1)
    waited = datetime.datetime.fromisoformat(shrank["time"]) - idle_at
    assert waited.total_seconds() > WINDOW_SECONDS - 3, "one round may have seen the end, and times are whole seconds"
    await cluster.client.delete(LLMDS, "phases", "default")


async def test_the_objective_grows_a_fleet_whose_blocks_and_queue_are_content(cluster: OperatorCluster) -> None:
    slo = {"percentile": 95, "timeToFirstTokenMilliseconds": 500}
    targets = {"kvBlockOccupancyPercent": 80, "queuedRequestsPerReplica": 5}
    served = await serve(
        cluster,
        "missing",
        {"autoscaling": {"maxReplicas": 2, "targets": targets, "slo": slo}},
        load=BUSY,
        first_token_seconds=2.0,
        requests_per_scrape=30,
    )
    await cluster.condition("SLOMet", "False", name="missing", reason="ObjectiveMissed")
    await wanted(cluster, "missing", 2)
    status = (await cluster.llmd("missing"))["status"]
    decision = status["autoscaling"]["decisions"][0]
    assert (decision["from"], decision["to"], decision["reason"]) == (1, 2, "Objective")
    assert status["slo"]["timeToFirstTokenMilliseconds"] > 500
    assert int(status["slo"]["attainment"].rstrip("%")) < 50
    # The second replica takes load away: from now on nearly all requests are fast.
    served.first_token_seconds, served.requests_per_scrape, served.load = 0.04, 3000, {"used": 20, "running": 2}
    await cluster.condition("SLOMet", "True", name="missing")

    async def moved() -> bool:
        slo_status = (await cluster.llmd("missing"))["status"]["slo"]
        return slo_status["timeToFirstTokenMilliseconds"] < 500 and int(slo_status["attainment"].rstrip("%")) > 90

    await cluster.until(moved, "the TTFT and SLO columns are good")
    await cluster.client.delete(LLMDS, "missing", "default")


async def test_an_objective_that_more_replicas_would_not_help_is_only_reported(cluster: OperatorCluster) -> None:
    slo = {"percentile": 95, "timeToFirstTokenMilliseconds": 500}
    served = await serve(
        cluster,
        "slow",
        {"autoscaling": {"maxReplicas": 4, "slo": slo}},
        load={"used": 10, "running": 1},
        first_token_seconds=2.0,
        requests_per_scrape=30,
    )
    missed = await cluster.condition("SLOMet", "False", name="slow", reason="ObjectiveNotCapacityBound")
    assert "room" in missed["message"]
    await asked(cluster, served, 2)
    found = await cluster.llmd("slow")
    assert found["spec"]["replicas"] == 1
    assert found["status"]["autoscaling"].get("decisions", []) == []
    await cluster.client.delete(LLMDS, "slow", "default")


def sharing(priority: int) -> Json:
    behavior = {"scaleDown": {"stabilizationWindowSeconds": 1}}
    scaling = {"maxReplicas": 3, "priority": priority, "behavior": behavior}
    return {"autoscaling": scaling, "engine": {"accelerator": {"resourceName": "nvidia.com/gpu"}}}


@contextlib.asynccontextmanager
async def never_more_devices_than(cluster: OperatorCluster, budget: int) -> AsyncIterator[None]:
    """All the while, those of leaving pods included."""
    most = 0

    async def watch_devices() -> None:
        nonlocal most
        while True:
            pods = (await cluster.client.list(PODS, "default"))["items"]
            limits = [pod["spec"]["containers"][0].get("resources", {}).get("limits", {}) for pod in pods]
            most = max(most, sum(int(limit.get("nvidia.com/gpu", 0)) for limit in limits))
            await asyncio.sleep(0.1)

    watcher = asyncio.create_task(watch_devices())
    try:
        yield
        assert not watcher.done()
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    assert 0 < most <= budget, "the budget was exceeded"


async def removed(cluster: OperatorCluster, *names: str) -> None:
    for name in names:
        await cluster.client.delete(LLMDS, name, "default")

    async def are_gone() -> bool:
        return not (await cluster.client.list(PODS, "default"))["items"]

    await cluster.until(are_gone, "their pods are gone")


async def test_the_last_device_goes_to_the_more_important_and_comes_back(cluster: OperatorCluster) -> None:
    """Three devices, two deployments that each want three."""
    async with never_more_devices_than(cluster, 3):
        humble = await serve(cluster, "humble", sharing(0))
        vip = await serve(cluster, "vip", sharing(10))
        humble.load = FULL
        await wanted(cluster, "humble", 2)
        limited = await cluster.condition("ScalingLimited", "True", name="humble", reason="DeviceBudget")
        assert "budget" in limited["message"]
        vip.load = FULL  # the device that humble has above its minimum is taken from it
        await wanted(cluster, "humble", 1)
        await wanted(cluster, "vip", 2)
        await cluster.condition("ScalingLimited", "True", name="vip", reason="DeviceBudget")
        vip.load = {}
        await wanted(cluster, "vip", 1)
        await wanted(cluster, "humble", 2)
    await removed(cluster, "humble", "vip")


async def test_of_equals_one_gets_the_last_device_and_the_other_when_it_is_free(cluster: OperatorCluster) -> None:
    """Both see their need in the same scrape round, and an operator that starts anew takes nothing from who has it."""
    async with never_more_devices_than(cluster, 3):
        served = {name: await serve(cluster, name, sharing(0)) for name in ("left", "right")}
        for pods in served.values():
            pods.load = FULL

        async def one_grew() -> str | None:
            counts = {name: (await cluster.llmd(name))["spec"]["replicas"] for name in served}
            return max(counts, key=lambda name: counts[name]) if sorted(counts.values()) == [1, 2] else None

        winner = await cluster.until(one_grew, "one of them has two replicas")
        [loser] = set(served) - {winner}
        await wanted(cluster, winner, 2)
        await cluster.condition("ScalingLimited", "True", name=loser, reason="DeviceBudget")
        assert await cluster.operator.stop() == 0
        await cluster.operator.start()
        await asked(cluster, served[loser], 3)
        assert await one_grew() == winner
        assert not {"DriftRepaired", "FieldContested"} & {*await cluster.events("left"), *await cluster.events("right")}
        served[winner].load = {}
        await wanted(cluster, loser, 2)
        await wanted(cluster, winner, 1)
    await removed(cluster, "left", "right")
