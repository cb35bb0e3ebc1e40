"""The local cluster's main job: Deployments of real processes that go Ready, answer, scale, roll, crash and end."""

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from pagefleet_localcluster.client import DEPLOYMENTS, PODS, REPLICA_SETS, SERVICES, ApiError, Client
from pagefleet_localcluster.objects import Object, condition_of, is_pod_ready
from support.local_cluster import (
    container,
    create,
    deployment,
    events_of,
    eventually,
    get,
    kubectl,
    pods,
    ready_pods,
    ready_probe,
    rolled_out,
    running_cluster,
    service_url,
)


def web_service(**spec: object) -> Object:
    return {
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 8080, "targetPort": "http"}], **spec},
    }


def web(*args: str, replicas: int = 1, **fields: object) -> Object:
    return deployment(
        "web", {"containers": [container(*args, readinessProbe=ready_probe())]}, replicas=replicas, **fields
    )


async def test_pods_become_ready_and_answer_through_the_service(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        await create(client, SERVICES, web_service())
        url = await service_url(client, "web")
        with pytest.raises(aiohttp.ClientConnectorError):
            await get(url)
        await create(client, DEPLOYMENTS, web(replicas=3))
        found = await ready_pods(client, "web", 3)
        names = {p["metadata"]["name"] for p in found}
        assert len({p["status"]["podIP"] for p in found}) == 3
        seen = {await eventually(lambda: get(url)) for _ in range(40)}
        assert seen == names
        await get(f"http://{found[0]['status']['podIP']}:8000/fail")
        await ready_pods_except(client, found[0]["metadata"]["name"])
        assert {await get(url) for _ in range(20)} == names - {found[0]["metadata"]["name"]}


async def ready_pods_except(client: Client, name: str) -> None:
    async def probe() -> bool:
        found = await pods(client, "web")
        return {p["metadata"]["name"] for p in found if not is_pod_ready(p)} == {name}

    await eventually(probe)


async def test_rollout_replaces_pods_without_refusing_a_request(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        await create(client, SERVICES, web_service())
        strategy = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
        await create(client, DEPLOYMENTS, web("--term", "0.3", replicas=2, strategy=strategy))
        await ready_pods(client, "web", 2)
        url = await service_url(client, "web")
        answers: list[str] = []

        async def ask() -> None:
            while True:
                answers.append(await get(url))
                await asyncio.sleep(0.01)

        await eventually(lambda: get(url))
        asking = asyncio.create_task(ask())
        patch = {"spec": {"template": {"metadata": {"annotations": {"round": "2"}}}}}
        await client.patch(DEPLOYMENTS, "web", patch, "default")
        done = await rolled_out(client, "web")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        if not asking.cancelled():
            asking.result()
        assert len(answers) > 10
        assert done["metadata"]["annotations"]["deployment.kubernetes.io/revision"] == "2"
        sets = (await client.list(REPLICA_SETS, "default"))["items"]
        assert sorted(rs["spec"]["replicas"] for rs in sets) == [0, 2]


async def test_scaling_down_deletes_the_cheapest(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        await create(client, DEPLOYMENTS, web(replicas=3))
        found = await ready_pods(client, "web", 3)
        cheap = found[1]["metadata"]["name"]
        patch = {"metadata": {"annotations": {"controller.kubernetes.io/pod-deletion-cost": "-1"}}}
        await client.patch(PODS, cheap, patch, "default")
        await client.patch(DEPLOYMENTS, "web", {"spec": {"replicas": 2}}, "default", subresource="scale")
        left = await ready_pods(client, "web", 2)
        assert {p["metadata"]["name"] for p in left} == {p["metadata"]["name"] for p in found} - {cheap}
        await client.patch(DEPLOYMENTS, "web", {"spec": {"replicas": 0}}, "default", subresource="scale")

        async def gone() -> bool:
            items: list[Object] = (await client.list(PODS, "default"))["items"]
            return not items and not list((tmp_path / "nodes" / "local-0" / "pods").iterdir())

        await eventually(gone)


async def test_a_crash_restarts_with_back_off_and_keeps_the_last_words(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        spec = container(
            "--say",
            "out of luck",
            readinessProbe=ready_probe(),
            env=[{"name": "MESSAGE", "value": "/dev/termination-log"}],
        )
        await create(client, DEPLOYMENTS, deployment("web", {"containers": [spec]}))
        [pod] = await ready_pods(client, "web", 1)
        url = f"http://{pod['status']['podIP']}:8000"
        for restarts in (1, 2):
            with pytest.raises(aiohttp.ClientError):
                await get(f"{url}/exit/{restarts + 2}")

            async def restarted(restarts: int = restarts) -> Object | None:
                [now] = await pods(client, "web")
                status = now["status"]["containerStatuses"][0]
                return status if status["restartCount"] == restarts and status["ready"] else None

            status = await eventually(restarted)
            last = status["lastState"]["terminated"]
            assert (last["exitCode"], last["reason"], last["message"]) == (restarts + 2, "Error", "out of luck")
        name = pod["metadata"]["name"]
        _, previous = await kubectl(cluster, "logs", name, "--previous", "--tail=1")
        assert previous == "exiting with 4\n"

        async def said() -> bool:
            return (await events_of(client, name))["BackOff"].startswith(
                "Back-off restarting failed container server in pod"
            )

        assert await eventually(said)


async def test_termination_is_graceful_then_forced(tmp_path: Path) -> None:
    """Not ready at once, SIGTERM, then SIGKILL when the grace period is over."""
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        await create(client, DEPLOYMENTS, web("--deaf"))
        [pod] = await ready_pods(client, "web", 1)
        loop = asyncio.get_running_loop()
        began = loop.time()
        name = pod["metadata"]["name"]
        await client.delete(PODS, name, "default")

        async def not_ready() -> Object | None:
            now = await client.get(PODS, name, "default")
            return now if not is_pod_ready(now) else None

        terminating = await eventually(not_ready)
        assert "running" in terminating["status"]["containerStatuses"][0]["state"]
        assert condition_of(terminating, "Ready") is not None

        async def gone() -> bool:
            try:
                await client.get(PODS, name, "default")
            except ApiError as error:
                return error.code == 404
            return False

        await eventually(gone)
        assert 0.9 < loop.time() - began < 3.0
        await ready_pods(client, "web", 1)


async def test_gpus_are_slots_and_a_pod_too_many_waits(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, nodes=2, gpus_per_node=1) as cluster:
        client = cluster.client
        spec = container(readinessProbe=ready_probe(), resources={"limits": {"nvidia.com/gpu": "1"}})
        await create(client, DEPLOYMENTS, deployment("gpu", {"containers": [spec]}, replicas=3))

        async def two_of_three() -> list[Object] | None:
            found = await pods(client, "gpu")
            return found if sum(map(is_pod_ready, found)) == 2 and len(found) == 3 else None

        found = await eventually(two_of_three)
        running = [p for p in found if is_pod_ready(p)]
        assert {p["spec"]["nodeName"] for p in running} == {"local-0", "local-1"}
        slots = {await get(f"http://{p['status']['podIP']}:8000/env/CUDA_VISIBLE_DEVICES") for p in running}
        assert slots == {"0", "1"}
        [waiting] = [p for p in found if not is_pod_ready(p)]
        condition = condition_of(waiting, "PodScheduled")
        want = (
            "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes are available: "
            "2 No preemption victims found for incoming pod."
        )
        assert condition is not None and (condition["reason"], condition["message"]) == ("Unschedulable", want)
        assert (await eventually(lambda: events_of(client, waiting["metadata"]["name"])))["FailedScheduling"] == want
        await client.delete(PODS, running[0]["metadata"]["name"], "default")

        async def took_over() -> bool:
            return is_pod_ready(await client.get(PODS, waiting["metadata"]["name"], "default"))

        await eventually(took_over)


async def test_probes_gate_and_restart(tmp_path: Path) -> None:
    """A late starter is held by its startup probe; a failing liveness probe restarts it."""
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        spec = container(
            "--wait",
            "0.5",
            startupProbe={"tcpSocket": {"port": "http"}, "periodSeconds": 1, "failureThreshold": 5},
            livenessProbe=ready_probe(failureThreshold=1),
            readinessProbe={"exec": {"command": ["test", "-d", "."]}, "periodSeconds": 1},
        )
        await create(client, DEPLOYMENTS, deployment("web", {"containers": [spec]}))
        [pod] = await ready_pods(client, "web", 1)
        await get(f"http://{pod['status']['podIP']}:8000/fail")

        async def restarted() -> Object | None:
            [now] = await pods(client, "web")
            status = now["status"]["containerStatuses"][0]
            return status if status["restartCount"] == 1 and status["ready"] else None

        await eventually(restarted)
        events = await events_of(client, pod["metadata"]["name"])
        assert events["Killing"] == "Container server failed liveness probe, will be restarted"
        assert events["Unhealthy"] in (
            "Liveness probe failed: HTTP probe failed with statuscode: 503",
            f"Startup probe failed: dial tcp {pod['status']['podIP']}:8000: connect: connection refused",
        )


async def test_stopping_the_cluster_leaves_no_process(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        await create(cluster.client, DEPLOYMENTS, web(replicas=2))
        await ready_pods(cluster.client, "web", 2)
        pids = [w.runners["server"].process for w in cluster.nodes["local-0"].workers.values()]
        running = [process.pid for process in pids if process is not None]
        assert len(running) == 2
    for pid in running:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIG_DFL)
