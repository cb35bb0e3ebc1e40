"""The operator is killed before each of its writes in turn: whatever it was doing, the next one ends it right.

One round per write: kill before the first one, then before the second one, and so on, until a round needs no kill.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from pagefleet_localcluster.client import DEPLOYMENTS
from support.operator_cluster import LLMDS, OperatorCluster, operator_cluster

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]
LEASE = ("--lease-seconds", "5")
QUICK = {"scaleDown": {"stabilizationWindowSeconds": 1}}
FULL = {"used": 100, "waiting_blocks": 60, "running": 5, "waiting": 3}
MOST_WRITES = 24
"""A change that needs more writes would be a fault of its own."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OperatorCluster]:
    async with operator_cluster(tmp_path_factory.mktemp("kills"), *LEASE) as running:
        yield running


@dataclass
class Reaper:
    """Kills the operator before its write number `countdown` about an object, Leases and Events apart."""

    cluster: OperatorCluster
    countdown: int
    victim: asyncio.subprocess.Process | None = None
    """Whom it killed."""

    def __call__(self, request: web.Request) -> web.Response | None:
        if request.method == "GET" or "/leases" in request.path or "/events" in request.path:
            return None
        self.countdown -= 1
        if self.countdown > 0:
            return None
        self.cluster.proxy.fault = None
        self.victim = self.cluster.operator.process
        assert self.victim is not None
        self.victim.send_signal(signal.SIGKILL)
        return web.Response(status=500)


async def images(cluster: OperatorCluster, name: str) -> set[str]:
    return {pod["spec"]["containers"][0]["image"] for pod in await cluster.pods(name)}


async def is_settled(cluster: OperatorCluster, name: str, replicas: int) -> bool:
    found = await cluster.llmd(name)
    status = found.get("status", {})
    progressing = [item for item in status.get("conditions", []) if item["type"] == "Progressing"]
    return (
        found["spec"]["replicas"] == replicas
        and status.get("observedGeneration") == found["metadata"]["generation"]
        and status.get("ready") == f"{replicas}/{replicas}"
        and len(await cluster.pods(name)) == replicas
        and all(item["status"] == "False" for item in progressing)
    )


async def watch_ready(cluster: OperatorCluster, name: str, seen: list[int]) -> None:
    while True:
        ready = 0
        for pod in await cluster.pods(name):
            conditions = pod.get("status", {}).get("conditions", [])
            ready += any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
        seen.append(ready)
        await asyncio.sleep(0.05)


async def supervise(cluster: OperatorCluster, finished: asyncio.Task[Any]) -> None:
    """Start the operator again whenever it ends, as a Deployment does: killed, or its lease lost on a busy machine."""
    while not finished.done():
        process = cluster.operator.process
        assert process is not None
        died = asyncio.create_task(process.wait())
        await asyncio.wait({finished, died}, return_when=asyncio.FIRST_COMPLETED)
        if died.done() and not finished.done():
            await cluster.operator.start()
        died.cancel()


async def settle(cluster: OperatorCluster, name: str, replicas: int) -> None:
    what = f"{name}: {replicas} replicas"
    finished = asyncio.create_task(cluster.until(lambda: is_settled(cluster, name, replicas), what, seconds=60))
    await supervise(cluster, finished)
    await finished


async def kill_once(
    cluster: OperatorCluster,
    name: str,
    number: int,
    change: Callable[[], Awaitable[Any]],
    ends: Callable[[], Awaitable[Any]],
) -> bool:
    """Make the change, kill the operator before its write `number`, wait for the right end. False: no such write."""
    reaper = Reaper(cluster, number)
    cluster.proxy.fault = reaper
    ready: list[int] = []
    watching = asyncio.create_task(watch_ready(cluster, name, ready))
    try:
        await change()
        finished = asyncio.create_task(cluster.until(ends, f"{name}: the right end", seconds=90))
        await supervise(cluster, finished)
        await finished
        cluster.proxy.fault = None
        if cluster.operator.process is reaper.victim:  # before a write after the end
            await cluster.operator.stop(signal.SIGKILL)
            await cluster.operator.start()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert min(ready) >= 1, "there was always a replica that served"
    return reaper.victim is not None


async def remove(cluster: OperatorCluster, name: str) -> None:
    await cluster.client.delete(LLMDS, name, "default")

    async def gone() -> bool:
        return await cluster.get(DEPLOYMENTS, name) is None and not await cluster.pods(name)

    await cluster.until(gone, "children collected")


async def kill_rounds(one: Callable[[int], Awaitable[bool]]) -> None:
    for number in range(1, MOST_WRITES + 1):
        if not await one(number):
            assert number > 1, "the operator wrote nothing at all"
            return
    raise AssertionError("the change never came to its end without a kill")


async def test_killed_during_a_rollout(cluster: OperatorCluster) -> None:
    async def one(number: int) -> bool:
        await cluster.create({"replicas": 2, "engine": {"image": "old:1"}}, name="rolled")
        await settle(cluster, "rolled", 2)

        async def change() -> None:
            await cluster.client.patch(LLMDS, "rolled", {"spec": {"engine": {"image": "new:2"}}}, "default")

        async def ends() -> bool:
            return await images(cluster, "rolled") == {"new:2"} and await is_settled(cluster, "rolled", 2)

        killed = await kill_once(cluster, "rolled", number, change, ends)
        assert "failedTemplateHash" not in str((await cluster.llmd("rolled"))["status"])
        await remove(cluster, "rolled")
        return killed

    await kill_rounds(one)


async def test_killed_during_a_rollout_that_fails(cluster: OperatorCluster) -> None:
    async def one(number: int) -> bool:
        await cluster.create({"replicas": 2, "engine": {"image": "good:1"}}, name="failing")
        await settle(cluster, "failing", 2)
        before = {pod["metadata"]["name"] for pod in await cluster.pods("failing")}
        cluster.node.crashes["failing"] = "unknown option"

        async def change() -> None:
            await cluster.client.patch(LLMDS, "failing", {"spec": {"engine": {"image": "bad:2"}}}, "default")

        async def ends() -> bool:
            found = (await cluster.llmd("failing"))["status"]
            reasons = {item["reason"] for item in found["conditions"] if item["type"] == "Degraded"}
            return (
                reasons == {"RolloutFailed"}
                and bool(found["rollout"]["failedTemplateHash"])
                and {pod["metadata"]["name"] for pod in await cluster.pods("failing")} == before
            )

        killed = await kill_once(cluster, "failing", number, change, ends)
        assert await images(cluster, "failing") == {"good:1"}
        del cluster.node.crashes["failing"]
        await remove(cluster, "failing")
        return killed

    await kill_rounds(one)


async def test_killed_during_a_scale_out_and_in(cluster: OperatorCluster) -> None:
    async def one(number: int) -> bool:
        cluster.node.loads.pop("scaled", None)
        await cluster.create({"autoscaling": {"maxReplicas": 3, "behavior": QUICK}}, name="scaled")
        await settle(cluster, "scaled", 1)

        async def fill() -> None:
            cluster.node.loads["scaled"] = FULL

        grown = await kill_once(cluster, "scaled", number, fill, lambda: is_settled(cluster, "scaled", 3))

        async def empty() -> None:
            cluster.node.loads["scaled"] = {}

        shrunk = await kill_once(cluster, "scaled", number, empty, lambda: is_settled(cluster, "scaled", 1))
        await remove(cluster, "scaled")
        return grown or shrunk

    await kill_rounds(one)


async def test_a_rollout_begun_and_failed_while_no_operator_ran_is_judged_by_the_next_one(
    cluster: OperatorCluster,
) -> None:
    await cluster.create({"replicas": 2, "engine": {"image": "good:1"}}, name="unseen")
    await settle(cluster, "unseen", 2)
    cluster.node.crashes["unseen"] = "unknown option"
    await cluster.client.patch(LLMDS, "unseen", {"spec": {"engine": {"image": "bad:2"}}}, "default")

    async def begun() -> bool:
        return "bad:2" in await images(cluster, "unseen")

    await cluster.until(begun, "the new template is under way")
    await cluster.operator.stop(signal.SIGKILL)
    assert (await images(cluster, "unseen")) >= {"good:1"}
    await cluster.operator.start()
    await cluster.condition("Degraded", "True", name="unseen", reason="RolloutFailed")

    async def back() -> bool:
        return await images(cluster, "unseen") == {"good:1"} and len(await cluster.pods("unseen")) == 2

    await cluster.until(back, "the replicas of before")
    del cluster.node.crashes["unseen"]
    await remove(cluster, "unseen")
