"""Random scaling, rolling, killing, deleting, stopping of nodes: in the end everything converges and nothing leaks."""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from pagefleet_localcluster.client import DEPLOYMENTS, PODS, REPLICA_SETS, ApiError
from pagefleet_localcluster.launcher import LocalCluster
from pagefleet_localcluster.objects import Object, is_pod_ready
from support.local_cluster import create, deployment, eventually, running_cluster

APPS = ("a", "b", "gpu")
NODES = 2


def sleeper(app: str) -> Object:
    """A cheap pod; some end themselves, some ignore SIGTERM."""
    script = {"a": "exec sleep 1000", "b": "trap '' TERM; sleep 1000 & wait; wait", "gpu": "exec sleep 1000"}[app]
    resources = {"limits": {"nvidia.com/gpu": "1"}} if app == "gpu" else {}
    container = {"name": "c", "image": "busybox", "command": ["sh", "-c", script], "resources": resources}
    tolerations = [{"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0}]
    return {"containers": [container], "tolerations": tolerations}


class Chaos:
    """Does one random thing at a time."""

    def __init__(self, cluster: LocalCluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.done: list[str] = []

    async def act(self) -> None:
        actions: list[Callable[[], Awaitable[None]]] = [
            self.scale,
            self.roll,
            self.delete,
            self.kill,
            self.pause,
            self.bounce,
        ]
        [action] = self.random.choices(actions, weights=[4, 4, 4, 4, 1, 1])
        self.done.append(action.__name__)
        try:
            await action()
        except ApiError as error:
            assert error.code in (404, 409), error

    async def scale(self) -> None:
        await self._patch({"replicas": self.random.randrange(5)})

    async def roll(self) -> None:
        annotations = {"round": str(self.random.random())}
        await self._patch({"template": {"metadata": {"annotations": annotations}}})

    async def pause(self) -> None:
        await self._patch({"paused": self.random.random() < 0.5})

    async def delete(self) -> None:
        items = (await self.cluster.client.list(PODS, "default"))["items"]
        if items:
            name = self.random.choice(items)["metadata"]["name"]
            await self.cluster.client.delete(PODS, name, "default", grace_seconds=self.random.choice([None, 0, 1]))

    async def kill(self) -> None:
        workers = [worker for node in self.cluster.nodes.values() for worker in node.workers.values()]
        processes = [p for worker in workers if (p := worker.runners["c"].process) is not None]
        if processes:
            self.random.choice(processes).signal(signal.SIGKILL)

    async def bounce(self) -> None:
        index = self.random.randrange(NODES)
        await self.cluster.stop_node(f"local-{index}")
        await self.cluster.start_node(index)

    async def _patch(self, spec: Object) -> None:
        app = self.random.choice(APPS)
        await self.cluster.client.patch(DEPLOYMENTS, app, {"spec": spec}, "default")


def leftovers(cluster: LocalCluster, folder: Path) -> dict[str, list[str]]:
    """What nodes hold beyond their pods: processes, folders, addresses, GPU slots."""
    workers = {uid: worker for node in cluster.nodes.values() for uid, worker in node.workers.items()}
    wanted = {p.pid for w in workers.values() if (p := w.runners["c"].process) is not None}
    leaders = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            ours = str(folder).encode() in (entry / "environ").read_bytes()
            session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
        except (OSError, IndexError):
            continue
        if ours:
            leaders.add(session)
    folders = {path.name for path in folder.glob("nodes/*/pods/*")}
    return {
        "processes": [str(pid) for pid in leaders - wanted],
        "folders": sorted(folders - set(workers)),
        "workers": sorted(set(workers) - folders),
    }


async def churn(folder: Path, seed: int, actions: int) -> None:
    async with running_cluster(folder, nodes=NODES, gpus_per_node=2) as cluster:
        client, chaos = cluster.client, Chaos(cluster, seed)
        for app in APPS:
            await create(client, DEPLOYMENTS, deployment(app, sleeper(app), replicas=2))
        for _ in range(actions):
            await chaos.act()
            await asyncio.sleep(chaos.random.uniform(0, 0.1))
        for app in APPS:
            await client.patch(DEPLOYMENTS, app, {"spec": {"replicas": 2, "paused": False}}, "default")

        async def converged() -> bool:
            items = (await client.list(PODS, "default"))["items"]
            sets = (await client.list(REPLICA_SETS, "default"))["items"]
            assert sorted(p["metadata"]["labels"]["app"] for p in items) == ["a", "a", "b", "b", "gpu", "gpu"], (
                chaos.done
            )
            assert sum(rs["spec"]["replicas"] for rs in sets) == 6, chaos.done
            assert all(map(is_pod_ready, items)), chaos.done
            uids = {p["metadata"]["uid"] for p in items}
            assert uids == {uid for node in cluster.nodes.values() for uid in node.workers}
            assert leftovers(cluster, folder) == {"processes": [], "folders": [], "workers": []}
            return True

        await eventually(converged, 60)
        addresses = [p["status"]["podIP"] for p in (await client.list(PODS, "default"))["items"]]
        assert len(set(addresses)) == 6
        for app in APPS:
            await client.delete(DEPLOYMENTS, app, "default")

        async def empty() -> bool:
            assert (await client.list(PODS, "default"))["items"] == []
            assert (await client.list(REPLICA_SETS, "default"))["items"] == []
            assert leftovers(cluster, folder) == {"processes": [], "folders": [], "workers": []}
            return True

        await eventually(empty, 30)
        for node in cluster.nodes.values():
            assert node.is_idle


async def test_a_churned_cluster_converges_and_leaks_nothing(tmp_path: Path) -> None:
    await churn(tmp_path, seed=1, actions=60)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
async def test_many_churned_clusters_converge_and_leak_nothing(seed: int, tmp_path: Path) -> None:
    await churn(tmp_path, seed=100 + seed, actions=400)
