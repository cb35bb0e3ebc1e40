"""Leaders: one works, the next one follows, and what a former one still sends changes nothing."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from pagefleet_localcluster.client import DEPLOYMENTS
from support.operator_cluster import LLMDS, OperatorCluster, OperatorProcess, operator_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]
LEASE = ("--lease-seconds", "7")
"""Long enough to be kept on a busy machine."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OperatorCluster]:
    async with operator_cluster(tmp_path_factory.mktemp("leaders"), *LEASE) as running:
        yield running


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def started(cluster: OperatorCluster) -> None:
    """An operator that ended, its lease lost on a busy machine, is started again, as a Deployment does."""
    if cluster.operator.process is not None and cluster.operator.process.returncode is not None:
        await cluster.operator.start()


async def test_a_stopped_leader_is_followed_and_writes_nothing_when_it_wakes(
    cluster: OperatorCluster, tmp_path: Path
) -> None:
    standby = OperatorProcess(cluster.operator.kubeconfig, tmp_path / "standby.log", LEASE)
    leader = cluster.operator.process
    assert leader is not None
    await cluster.create({"replicas": 1}, name="fenced")
    await cluster.condition("Available", "True", name="fenced")  # so it is this one that leads
    await standby.start()
    try:
        leader.send_signal(signal.SIGSTOP)
        await cluster.client.patch(LLMDS, "fenced", {"spec": {"replicas": 2}}, "default")

        async def followed() -> bool:
            return len(await cluster.pods("fenced")) == 2

        await cluster.until(followed, "the standby took over")
        leader.send_signal(signal.SIGCONT)
        async with asyncio.timeout(90):
            assert await leader.wait() == 2
        assert len(await cluster.pods("fenced")) == 2
        await cluster.client.delete(LLMDS, "fenced", "default")
    finally:
        await standby.stop()
        await cluster.operator.start()


@contextlib.asynccontextmanager
async def held_write(cluster: OperatorCluster, path: str) -> AsyncIterator[tuple[asyncio.Event, asyncio.Event]]:
    """Keeps the first PATCH of this path on its way: (it is caught, let it go). Ends with a new operator."""
    leader = cluster.operator.process
    assert leader is not None
    caught, released = asyncio.Event(), asyncio.Event()

    async def hold(request: web.Request) -> None:
        if request.method == "PATCH" and request.path == path and not caught.is_set():
            caught.set()
            await released.wait()

    cluster.proxy.delay = hold
    try:
        yield caught, released
    finally:
        released.set()
        with contextlib.suppress(ProcessLookupError):  # it has ended
            leader.send_signal(signal.SIGCONT)
        cluster.proxy.delay = None
        await cluster.operator.stop()
        await cluster.operator.start()


@pytest.mark.parametrize("is_first", [False, True], ids=["a change", "a creation"])
async def test_a_write_of_a_stopped_leader_that_arrives_late_is_refused(
    cluster: OperatorCluster, tmp_path: Path, is_first: bool
) -> None:
    """The lease keeps a leader from sending; what it had sent before it was stopped, its uid and version fence. The
    first apply of a child carried neither, and put an old spec over the next leader's."""
    name = "late-new" if is_first else "late"
    standby = OperatorProcess(cluster.operator.kubeconfig, tmp_path / "standby.log", LEASE)
    leader = cluster.operator.process
    assert leader is not None
    path = f"/apis/apps/v1/namespaces/default/deployments/{name}"
    led = "led" if is_first else name
    await cluster.create({"replicas": 1}, name=led)
    await cluster.condition("Available", "True", name=led)  # so it is this one that leads
    await standby.start()
    try:
        async with held_write(cluster, path) as (caught, released):
            if is_first:
                await cluster.create({"replicas": 2}, name=name)
            else:
                await cluster.client.patch(LLMDS, name, {"spec": {"replicas": 2}}, "default")
            async with asyncio.timeout(90):
                await caught.wait()
            leader.send_signal(signal.SIGSTOP)
            await cluster.client.patch(LLMDS, name, {"spec": {"replicas": 3}}, "default")

            async def followed() -> bool:
                return bool((await cluster.llmd(name)).get("status", {}).get("ready") == "3/3")

            await cluster.until(followed, "the standby took over")
            before = len(cluster.proxy.seen)
            made = await cluster.get(DEPLOYMENTS, name)
            released.set()

            async def arrived() -> list[int]:
                late = [seen for seen in cluster.proxy.seen[before:] if (seen.method, seen.path) == ("PATCH", path)]
                return [seen.status for seen in late]

            assert await cluster.until(arrived, "the late write") == [409]
            leader.send_signal(signal.SIGCONT)
            async with asyncio.timeout(90):
                assert await leader.wait() == 2
            found = await cluster.get(DEPLOYMENTS, name)
            assert found is not None
            assert made is not None
            assert found["metadata"]["generation"] == made["metadata"]["generation"]
            assert len(await cluster.pods(name)) == 3
            for made_here in {name, led}:
                await cluster.client.delete(LLMDS, made_here, "default")
            await standby.stop()
    finally:
        await standby.stop()


async def test_a_child_that_is_created_late_for_an_object_that_is_gone_goes_by_itself(cluster: OperatorCluster) -> None:
    path = "/apis/apps/v1/namespaces/default/deployments/too-late"
    leader = cluster.operator.process
    assert leader is not None
    async with held_write(cluster, path) as (caught, released):
        await cluster.create({"replicas": 1}, name="too-late")
        async with asyncio.timeout(90):
            await caught.wait()
        leader.send_signal(signal.SIGSTOP)
        await cluster.client.delete(LLMDS, "too-late", "default")
        before = len(cluster.proxy.seen)
        released.set()

        async def arrived() -> list[int]:
            return [seen.status for seen in cluster.proxy.seen[before:] if seen.path == path]

        assert await cluster.until(arrived, "the late write") == [201]

        async def gone() -> bool:
            return await cluster.get(DEPLOYMENTS, "too-late") is None and not await cluster.pods("too-late")

        await cluster.until(gone, "the orphan is collected by its owner's uid")


@pytest.mark.long
async def test_of_two_operators_one_works_and_the_other_follows_when_it_is_killed(
    cluster: OperatorCluster, tmp_path: Path
) -> None:
    other = OperatorProcess(cluster.operator.kubeconfig, tmp_path / "other.log", LEASE)
    await other.start()
    try:
        await cluster.create({"replicas": 2}, name="shared")
        await cluster.condition("Available", "True", name="shared")
        assert len(await cluster.pods("shared")) == 2

        async def stands_by() -> bool:
            return "standby: lease" in other.log.read_text()

        await cluster.until(stands_by, "the other one stands by")
        assert "serving" not in other.log.read_text()
        await cluster.operator.stop(signal.SIGKILL)
        await cluster.client.patch(LLMDS, "shared", {"spec": {"replicas": 3}}, "default")

        async def followed() -> bool:
            return len(await cluster.pods("shared")) == 3

        await cluster.until(followed, "the other one took over")
        deployment = await cluster.get(DEPLOYMENTS, "shared")
        assert deployment is not None
        assert deployment["spec"]["replicas"] == 3
        await cluster.client.delete(LLMDS, "shared", "default")
    finally:
        await other.stop()
        await cluster.operator.start()
