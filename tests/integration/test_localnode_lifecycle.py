"""Nodes and clusters that die: pods move, nothing survives, the next start cleans up."""

import asyncio
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from pagefleet_localcluster.client import DEPLOYMENTS, NODES, PODS, Client
from pagefleet_localcluster.kubeconfig import Kubeconfig
from pagefleet_localcluster.launcher import ClusterSettings, LocalCluster
from pagefleet_localcluster.node.node import Node
from pagefleet_localcluster.node.settings import NodeSettings
from pagefleet_localcluster.objects import Object, condition_of, is_deleted, is_pod_ready
from support.local_cluster import (
    container,
    create,
    deployment,
    eventually,
    get,
    pods,
    ready_pods,
    ready_probe,
    running_cluster,
)

DOCUMENTATION = (Path(__file__).resolve().parents[2] / "docs" / "localcluster.md").read_text()
LOCAL = [sys.executable, "-m", "pagefleet_localcluster.main"]


def processes_naming(folder: Path) -> list[int]:
    """Living processes whose environment or command line mentions `folder`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in text and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@asynccontextmanager
async def local(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *LOCAL, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def run_local(*words: str) -> tuple[int, str]:
    async with local(*words) as process:
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode()


def movable() -> Object:
    """Pods that leave a dead node at once."""
    spec = {
        "containers": [container(readinessProbe=ready_probe())],
        "tolerations": [
            {
                "key": "node.kubernetes.io/unreachable",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": 0,
            }
        ],
    }
    return deployment("web", spec, replicas=2)


async def test_pods_of_a_killed_node_run_again_elsewhere(tmp_path: Path) -> None:
    """The node's death kills its processes; the controllers notice by its lease; a new start of it cleans up."""
    async with running_cluster(
        tmp_path / "cluster", nodes=1, node_grace_seconds=2.0, node_options={"lease_seconds": 0.5}
    ) as cluster:
        client = cluster.client
        folder = tmp_path / "second"
        words = ["node", "--kubeconfig", str(cluster.kubeconfig_path), "--name", "second", "--dir", str(folder)]
        words += ["--lease-seconds", "0.5"]
        async with local(*words) as node:

            async def joined() -> bool:
                condition = condition_of(await client.get(NODES, "second"), "Ready")
                return condition is not None and condition["status"] == "True"

            await eventually(joined)
            await create(client, DEPLOYMENTS, movable())
            found = await ready_pods(client, "web", 2)
            assert {p["spec"]["nodeName"] for p in found} == {"local-0", "second"}
            [victim] = [p for p in found if p["spec"]["nodeName"] == "second"]
            assert processes_naming(folder)
            node.kill()
            await node.wait()

            async def dead() -> bool:
                return processes_naming(folder) == []

            await eventually(dead)

            async def moved() -> list[Object] | None:
                now = await pods(client, "web")
                nodes = [p["spec"]["nodeName"] for p in now if is_pod_ready(p)]
                return now if nodes == ["local-0", "local-0"] else None

            await eventually(moved)
            stuck = await client.get(PODS, victim["metadata"]["name"], "default")
            assert is_deleted(stuck), "only its node, or the end of the Node object, confirms the end of a pod"
            ready = condition_of(await client.get(NODES, "second"), "Ready")
            assert ready is not None and (ready["status"], ready["reason"]) == ("Unknown", "NodeStatusUnknown")
        async with local(*words):

            async def confirmed() -> bool:
                items = (await client.list(PODS, "default"))["items"]
                back = condition_of(await client.get(NODES, "second"), "Ready")
                return len(items) == 2 and back is not None and back["status"] == "True"

            await eventually(confirmed)


async def test_pods_of_a_deleted_node_are_forgotten(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, nodes=2) as cluster:
        client = cluster.client
        await create(client, DEPLOYMENTS, movable())
        await ready_pods(client, "web", 2)
        await cluster.stop_node("local-1")
        await client.delete(NODES, "local-1")

        async def moved() -> bool:
            now = (await client.list(PODS, "default"))["items"]
            return len(now) == 2 and {p["spec"]["nodeName"] for p in now} == {"local-0"} and all(map(is_pod_ready, now))

        await eventually(moved)


async def test_pods_go_on_after_a_restart_of_the_cluster(tmp_path: Path) -> None:
    """Objects are kept; the same pods run again, each on a new address and with one restart more."""
    options = {"data_directory": tmp_path / "data"}
    async with running_cluster(tmp_path / "cluster", **options) as cluster:
        await create(cluster.client, DEPLOYMENTS, movable())
        before = {p["metadata"]["name"]: p for p in await ready_pods(cluster.client, "web", 2)}
    async with running_cluster(tmp_path / "cluster", **options) as cluster:

        async def again() -> bool:
            now = await pods(cluster.client, "web")
            counts = [p["status"]["containerStatuses"][0]["restartCount"] for p in now]
            return (
                {p["metadata"]["name"] for p in now} == set(before) and counts == [1, 1] and all(map(is_pod_ready, now))
            )

        await eventually(again)
        for pod in await pods(cluster.client, "web"):
            old, new = before[pod["metadata"]["name"]]["status"], pod["status"]
            assert new["podIP"] != old["podIP"] and new["startTime"] == old["startTime"]
            assert await get(f"http://{new['podIP']}:8000") == pod["metadata"]["name"]


async def test_pods_outlive_an_absent_api_server(tmp_path: Path) -> None:
    """Another node's pods run on without an API server; what happened meanwhile is told when it is back."""
    settings = ClusterSettings(tmp_path / "cluster", nodes=0, data_directory=tmp_path / "data")
    async with LocalCluster(settings) as cluster:
        kubeconfig = Kubeconfig.load(cluster.kubeconfig_path)
        settings = replace(settings, port=int(cluster.url.rpartition(":")[2]))
        client = await Client(kubeconfig, user_agent="kubelet").__aenter__()
        options = NodeSettings("n", tmp_path / "n", tmp_path / "shared", lease_seconds=0.2, backoff_min_seconds=0.1)
        node = Node(options, client, rng=random.Random())
        running = asyncio.create_task(node.run())
        await create(cluster.client, DEPLOYMENTS, deployment("web", {"containers": [container()]}))
        [pod] = await ready_pods(cluster.client, "web", 1)
    url = f"http://{pod['status']['podIP']}:8000"
    try:
        assert await eventually(lambda: get(url)) == pod["metadata"]["name"]
        with pytest.raises(aiohttp.ClientError):
            await get(f"{url}/exit/3")

        async def restarted() -> bool:
            return bool(await get(url) == pod["metadata"]["name"])

        await eventually(restarted)
        async with LocalCluster(settings) as cluster:

            async def told() -> bool:
                status = (await cluster.client.get(PODS, pod["metadata"]["name"], "default"))["status"]
                [container_status] = status["containerStatuses"]
                return bool(container_status["restartCount"] == 1 and container_status["ready"])

            await eventually(told)
            await cluster.client.delete(DEPLOYMENTS, "web", "default")

            async def gone() -> bool:
                items: list[Object] = (await cluster.client.list(PODS, "default"))["items"]
                return not items and not node.workers

            await eventually(gone)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await node.close()
        await client.__aexit__(None, None, None)


async def test_up_status_kubeconfig_and_down(tmp_path: Path) -> None:
    folder = ["--dir", str(tmp_path)]
    code, text = await run_local("status", *folder)
    assert (code, text) == (1, f"no cluster runs in {tmp_path}\n")
    code, text = await run_local("kubeconfig", *folder)
    assert code == 1 and "start one with `pagefleet-local up`" in text
    code, text = await run_local("up", "--detach", "--nodes", "2", *folder)
    stop = f"stop it with `pagefleet-local down --dir {tmp_path}`"  # without the folder it would stop another one
    try:
        assert stop in text
        assert code == 0 and re.search(r"cluster ready in \d\.\d\d s at http://127\.0\.0\.1:\d+: 2 node", text), text
        code, again = await run_local("up", *folder)
        assert code == 1 and "a cluster already runs in" in again and stop in again
        code, path = await run_local("kubeconfig", *folder)
        assert (code, path) == (0, f"{tmp_path / 'kubeconfig'}\n")
        async with Client(Kubeconfig.load(path.strip())) as client:
            await create(client, DEPLOYMENTS, movable())
            [first, *_] = await ready_pods(client, "web", 2)
            assert await get(f"http://{first['status']['podIP']}:8000") == first["metadata"]["name"]
        code, text = await run_local("status", *folder)
        assert code == 0 and text.startswith("running (pid ")
    finally:
        code, text = await run_local("down", *folder)
    assert (code, text) == (0, "stopped\n")
    assert processes_naming(tmp_path) == []
    assert files_below(tmp_path) == ["cluster.log"]


async def test_the_documented_commands_work_as_written(tmp_path: Path) -> None:
    """The first console block of docs/localcluster.md, line by line, in a fresh folder."""
    block = DOCUMENTATION.split("```console\n")[1].split("```")[0]
    script = "set -e\n" + "\n".join(line.removeprefix("$ ") for line in block.splitlines())
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    shell = await asyncio.create_subprocess_exec(
        *("bash", "-c", script),
        cwd=tmp_path,
        env={"PATH": path, "HOME": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await shell.communicate()
    said = output.decode()
    assert shell.returncode == 0, said
    assert re.search(r"local-0 +Ready.*\nlocal-1 +Ready", said) and said.endswith("stopped\n")
    assert processes_naming(tmp_path) == []


async def test_a_killed_cluster_leaves_nothing_that_down_does_not_end(tmp_path: Path) -> None:
    """SIGKILL cannot be answered: the kernel ends containers, `down` what they had started."""
    async with local("up", "--dir", str(tmp_path)) as cluster:

        async def up() -> Kubeconfig:
            return Kubeconfig.load(tmp_path / "kubeconfig")

        kubeconfig = await eventually(lambda: up() if (tmp_path / "cluster.json").exists() else asyncio.sleep(0, None))
        async with Client(kubeconfig) as client:
            script = "python -I -S -c 'import time; time.sleep(100)' & wait"
            shell = {"name": "c", "image": "busybox", "command": ["sh", "-c", script]}
            await create(client, PODS, {"metadata": {"name": "p"}, "spec": {"containers": [shell]}})

            async def running() -> bool:
                return is_pod_ready(await client.get(PODS, "p", "default")) and len(processes_naming(tmp_path)) == 3

            await eventually(running)
        cluster.send_signal(signal.SIGKILL)
        await cluster.wait()
    code, text = await run_local("down", "--dir", str(tmp_path))
    assert code == 0 and "ended 1 processes of a killed one" in text

    async def nothing() -> bool:
        return processes_naming(tmp_path) == []

    await eventually(nothing)


async def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    async with local("up", "--dir", str(tmp_path)) as cluster:

        async def up() -> bool:
            return (tmp_path / "cluster.json").exists()

        await eventually(up)
        async with Client(Kubeconfig.load(tmp_path / "kubeconfig")) as client:
            await create(client, DEPLOYMENTS, movable())
            await ready_pods(client, "web", 2)
        cluster.send_signal(signal.SIGINT)
        output, _ = await cluster.communicate()
        assert cluster.returncode == 0
        assert output.decode().endswith("stopping\nstopped\n")
    assert processes_naming(tmp_path) == []
