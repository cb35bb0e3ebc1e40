"""The fault matrix: each fault ends in the named condition and a safe replica count, and touches nothing else."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
from aiohttp import web

from pagefleet_localcluster.client import DEPLOYMENTS, PODS
from support.operator_cluster import LLMDS, OperatorCluster, operator_cluster
from support.operator_objects import metrics_text

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]
QUICK = {"scaleDown": {"stabilizationWindowSeconds": 1}}
FULL = {"used": 100, "waiting_blocks": 60, "running": 5, "waiting": 3}
LEASE = ("--lease-seconds", "5")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OperatorCluster]:
    folder = tmp_path_factory.mktemp("faults")
    async with operator_cluster(folder, *LEASE, "--listen", "127.0.0.1:0") as running:
        running.operator.is_supervised = True
        yield running


async def operator_metrics(cluster: OperatorCluster) -> str:
    found = re.findall(r"health and metrics on port (\d+)", cluster.operator.log.read_text())
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{found[-1]}/metrics") as response:
        return await response.text()


async def rounds(cluster: OperatorCluster, number: int) -> None:
    """Returns when so many more scrape rounds have ended."""

    async def ended() -> float:
        (count,) = re.findall(
            r"^pagefleet_operator_scrape_round_seconds_count (\S+)", await operator_metrics(cluster), re.M
        )
        return float(count)

    before = await ended()

    async def are_over() -> bool:
        return await ended() >= before + number

    await cluster.until(are_over, f"{number} more scrape rounds", seconds=30)


def text(body: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(text=body)

    return answer


async def fails(_: web.Request) -> web.StreamResponse:
    return web.Response(status=500)


async def hangs(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


async def never_ends(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:  # until the operator hangs up
        await response.write(b"#" * 65536)


async def drips(request: web.Request) -> web.StreamResponse:
    """Right in the end, but a byte at a time."""
    response = web.StreamResponse()
    await response.prepare(request)
    for byte in metrics_text().encode():
        await response.write(bytes([byte]))
        await asyncio.sleep(0.05)
    return response


async def is_large(request: web.Request) -> web.StreamResponse:
    """Announces 100 MB and sends them."""
    response = web.StreamResponse()
    response.content_length = 100 * 1024 * 1024
    await response.prepare(request)
    for _ in range(1600):
        await response.write(b"#" * 65536)
    return response


HOSTILE = {
    "html": text("<html>502</html>"),
    "negative": text(metrics_text(running=-3)),
    "nan": text(metrics_text(waiting_blocks=float("nan"))),
    "huge": text(metrics_text(waiting_blocks=1e300)),
    "renamed": text(metrics_text().replace("pagefleet_", "other_")),
    "fails": fails,
    "hangs": hangs,
    "never-ends": never_ends,
    "large": is_large,
    "drips": drips,
}


async def test_hostile_metrics_are_that_pods_trouble_alone(cluster: OperatorCluster) -> None:
    for name, answer in HOSTILE.items():
        cluster.node.answers[name] = answer
        await cluster.create({"replicas": 2, "autoscaling": {"maxReplicas": 5, "behavior": QUICK}}, name=name)
    await cluster.create({"autoscaling": {"maxReplicas": 3, "behavior": QUICK}}, name="healthy")
    cluster.node.loads["healthy"] = FULL
    for name in HOSTILE:
        await cluster.condition("Degraded", "True", name=name, reason="MetricsUnreachable")
        await cluster.condition("ScalingActive", "False", name=name, reason="FailedGetMetrics")

    async def grown() -> bool:
        return bool((await cluster.llmd("healthy"))["status"]["ready"] == "3/3")

    await cluster.until(grown, "the healthy one scales")
    for name in HOSTILE:
        found = await cluster.llmd(name)
        assert found["spec"]["replicas"] == 2, name
        assert {row["state"] for row in found["status"]["pods"]} == {"Unreachable"}, name
        assert "kvBlocks" not in found["status"], name
        await cluster.client.delete(LLMDS, name, "default")
    await cluster.client.delete(LLMDS, "healthy", "default")


async def test_pods_that_cannot_run_are_explained_and_hold_the_replicas(cluster: OperatorCluster) -> None:
    await cluster.create({"resources": {"requests": {"cpu": "1000"}}}, name="too-big")
    found = await cluster.condition("Degraded", "True", name="too-big", reason="Unschedulable")
    assert "Insufficient cpu" in found["message"]
    assert (await cluster.llmd("too-big"))["status"]["pods"][0]["state"] == "Unschedulable"
    await cluster.client.delete(LLMDS, "too-big", "default")


async def test_an_image_that_cannot_be_pulled_is_named(cluster: OperatorCluster) -> None:
    cluster.node.missing_images.add("nowhere/server:9")
    await cluster.create({"engine": {"image": "nowhere/server:9"}}, name="no-image")
    found = await cluster.condition("Degraded", "True", name="no-image", reason="ImagePullFailed")
    assert "nowhere/server:9" in found["message"]
    assert (await cluster.llmd("no-image"))["spec"]["replicas"] == 1
    await cluster.client.delete(LLMDS, "no-image", "default")


async def test_a_pod_that_crashes_is_explained_and_the_others_serve_until_it_is_back(cluster: OperatorCluster) -> None:
    await cluster.create({"replicas": 2}, name="mortal")

    async def ready(count: int) -> bool:
        return bool((await cluster.llmd("mortal")).get("status", {}).get("ready") == f"{count}/2")

    await cluster.until(lambda: ready(2), "two replicas")
    victim = (await cluster.pods("mortal"))[0]
    await cluster.node.crash(victim, "segmentation fault in the engine")
    degraded = await cluster.condition("Degraded", "True", name="mortal", reason="CrashLoop")
    assert "segmentation fault in the engine" in degraded["message"]
    await cluster.condition("Available", "True", name="mortal")
    await cluster.until(lambda: ready(1), "one replica serves")
    assert (await cluster.llmd("mortal"))["spec"]["replicas"] == 2
    await cluster.node.recover(victim)
    await cluster.condition("Degraded", "False", name="mortal")
    await cluster.until(lambda: ready(2), "two replicas again")
    assert len(await cluster.pods("mortal")) == 2
    assert "Recovered" in await cluster.events("mortal")
    await cluster.client.delete(LLMDS, "mortal", "default")


async def test_a_crash_loop_is_explained_and_nothing_is_written_while_it_lasts(cluster: OperatorCluster) -> None:
    cluster.node.crashes["looping"], cluster.node.exit_code = "address already in use", 1
    await cluster.create({"replicas": 2, "autoscaling": {"maxReplicas": 4}}, name="looping")
    found = await cluster.condition("Degraded", "True", name="looping", reason="CrashLoop")
    assert "exit code 1: address already in use" in found["message"]

    async def both() -> bool:
        return len(await cluster.pods("looping")) == 2

    await cluster.until(both, "two pods")

    async def peace() -> bool:
        before = len(cluster.proxy.writes())
        await rounds(cluster, 2)
        return not [seen for seen in cluster.proxy.writes()[before:] if "looping" in seen.path]

    await cluster.until(peace, "rounds without a write, once what was on its way is written", seconds=30)
    assert (await cluster.llmd("looping"))["spec"]["replicas"] == 2
    cluster.node.exit_code = 3
    await cluster.client.delete(LLMDS, "looping", "default")


async def test_created_and_deleted_in_haste_the_last_one_has_its_own_children(cluster: OperatorCluster) -> None:
    created: dict[str, Any] = {}
    for turn in range(8):
        created = await cluster.create({"replicas": turn % 3}, name="hasty")
        await asyncio.sleep(0.05 * (turn % 3))
        if turn < 7:
            await cluster.client.delete(LLMDS, "hasty", "default")

    async def is_right() -> bool:
        deployment = await cluster.get(DEPLOYMENTS, "hasty")
        owners = deployment["metadata"]["ownerReferences"] if deployment is not None else [{}]
        ours = owners[0].get("uid") == created["metadata"]["uid"]
        return ours and len(await cluster.pods("hasty")) == 1

    await cluster.until(is_right, "children of the last one")
    await cluster.condition("Available", "True", name="hasty")
    await cluster.client.delete(LLMDS, "hasty", "default")


async def test_deleted_and_created_again_gets_children_of_its_own(cluster: OperatorCluster) -> None:
    for _ in range(2):
        created = await cluster.create({}, name="again")
        await cluster.condition("Available", "True", name="again")
        deployment = await cluster.get(DEPLOYMENTS, "again")
        assert deployment is not None
        assert deployment["metadata"]["ownerReferences"][0]["uid"] == created["metadata"]["uid"]
        await cluster.client.delete(LLMDS, "again", "default")


async def test_an_api_outage_holds_everything_and_is_caught_up(cluster: OperatorCluster) -> None:
    await cluster.create({"replicas": 2}, name="steady")
    await cluster.condition("Available", "True", name="steady")

    def storm(request: web.Request) -> web.Response | None:
        if "/leases/" in request.path:
            return None
        return web.Response(status=429, headers={"Retry-After": "1"}, text='{"reason": "TooManyRequests"}')

    def broken(request: web.Request) -> web.Response | None:
        return None if "/leases/" in request.path else web.Response(status=500, text="etcd is unwell")

    for replicas, fault in ((3, storm), (1, broken)):
        cluster.proxy.fault = fault
        before = len(cluster.proxy.seen)
        await cluster.client.patch(LLMDS, "steady", {"spec": {"replicas": replicas}}, "default")

        async def refused(before: int = before) -> bool:
            return sum(seen.status >= 429 for seen in cluster.proxy.seen[before:]) >= 4

        await cluster.until(refused, "tried and refused again and again")
        cluster.proxy.fault = None

        async def followed(wanted: int = replicas) -> bool:
            return len(await cluster.pods("steady")) == wanted

        await cluster.until(followed, f"{replicas} replicas after the outage")
    await cluster.client.delete(LLMDS, "steady", "default")


async def test_an_api_server_that_restarts_is_followed_by_the_same_operator(cluster: OperatorCluster) -> None:
    await cluster.create({"replicas": 1}, name="restarted")
    await cluster.condition("Available", "True", name="restarted")
    process = cluster.operator.process
    before = cluster.proxy.broken
    cluster.proxy.is_cut = True  # every connection breaks, those of the watches too
    await cluster.client.patch(LLMDS, "restarted", {"spec": {"replicas": 3}}, "default")

    async def missed() -> bool:
        return cluster.proxy.broken > before

    await cluster.until(missed, "a request broke")  # soon: the renew deadline of this lease is near
    cluster.proxy.is_cut = False

    async def followed() -> bool:
        status = (await cluster.llmd("restarted")).get("status", {})
        return len(await cluster.pods("restarted")) == 3 and status.get("ready") == "3/3"

    await cluster.until(followed, "three replicas after the restart")
    assert process is not None
    assert cluster.operator.process is process
    assert process.returncode is None
    await cluster.client.delete(LLMDS, "restarted", "default")


async def test_a_partition_longer_than_the_lease_ends_the_operator_and_the_next_one_catches_up(
    cluster: OperatorCluster,
) -> None:
    await cluster.create({"replicas": 2}, name="split")
    await cluster.condition("Available", "True", name="split")
    cluster.proxy.is_cut = True
    process = cluster.operator.process
    assert process is not None
    async with asyncio.timeout(90):
        assert await process.wait() == 2
    assert len(await cluster.pods("split")) == 2, "serving needs no operator"
    cluster.proxy.is_cut = False
    await cluster.client.patch(LLMDS, "split", {"spec": {"replicas": 1}}, "default")
    await cluster.operator.start()

    async def followed() -> bool:
        return len(await cluster.pods("split")) == 1

    await cluster.until(followed, "the new operator's work")
    await cluster.client.delete(LLMDS, "split", "default")


SHRINK_STEPS = {
    "before the decision is written": (r"/llmdeployments/killed/scale$", "PATCH"),
    "before the victim is marked": (r"/pods/killed-", "PATCH"),
    "before the Deployment shrinks": (r"/deployments/killed$", "PATCH"),
    "before the status says so": (r"/llmdeployments/killed/status$", "PATCH"),
}


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step, marks=[] if step == "before the Deployment shrinks" else [pytest.mark.long])
        for step in SHRINK_STEPS
    ],
)
async def test_killed_at_any_step_of_a_scale_down_it_ends_right(cluster: OperatorCluster, step: str) -> None:
    cluster.node.loads["killed"] = FULL
    await cluster.create({"autoscaling": {"maxReplicas": 2, "behavior": QUICK}}, name="killed")

    async def pods(wanted: int) -> bool:
        status = (await cluster.llmd("killed")).get("status", {})
        return len(await cluster.pods("killed")) == wanted and status.get("ready") == f"{wanted}/{wanted}"

    await cluster.until(lambda: pods(2), "two replicas")
    busy = sorted(pod["metadata"]["name"] for pod in await cluster.pods("killed"))[0]
    pattern, method = SHRINK_STEPS[step]
    process = cluster.operator.process
    assert process is not None

    def kill(request: web.Request) -> web.Response | None:
        if request.method == method and re.search(pattern, request.path):
            cluster.proxy.fault = None
            process.send_signal(signal.SIGKILL)
            return web.Response(status=500)
        return None

    cluster.proxy.fault = kill
    cluster.node.loads |= {"killed": {}, busy: {"used": 5, "running": 1}}
    async with asyncio.timeout(90):
        await process.wait()
    await cluster.operator.start()
    await cluster.until(lambda: pods(1), "one replica")
    assert [pod["metadata"]["name"] for pod in await cluster.pods("killed")] == [busy]
    await cluster.client.delete(LLMDS, "killed", "default")

    async def gone() -> bool:
        return await cluster.get(DEPLOYMENTS, "killed") is None

    await cluster.until(gone, "children collected")


@pytest.mark.long
async def test_two_hundred_objects_at_once(cluster: OperatorCluster) -> None:
    await cluster.operator.stop()
    cluster.operator.arguments = cluster.operator.arguments[2:]  # the usual lease
    await cluster.operator.start()
    names = [f"many-{index}" for index in range(200)]
    operator = psutil.Process(cluster.operator.process.pid)  # type: ignore[union-attr]
    before = sum(operator.cpu_times()[:2])
    await asyncio.gather(*(cluster.create({"replicas": 0}, name=name) for name in names))

    async def all_stopped() -> bool:
        found = (await cluster.client.list(LLMDS, "default"))["items"]
        phases = [item.get("status", {}).get("phase") for item in found if item["metadata"]["name"] in names]
        return phases.count("Stopped") == 200

    await cluster.until(all_stopped, "200 objects in their final phase", seconds=90)
    assert operator.memory_info().rss < 250e6
    # CPU, because API server, controllers and proxy share this machine: elapsed time is mostly theirs.
    assert (sum(operator.cpu_times()[:2]) - before) / len(names) < 0.1
    assert "pagefleet_operator_objects 200.0" in await operator_metrics(cluster)
    await asyncio.gather(*(cluster.client.delete(LLMDS, name, "default") for name in names))
    left = await cluster.client.list(PODS, "default", labelSelector="pagefleet.dev/llmdeployment=many-0")
    assert left["items"] == []
