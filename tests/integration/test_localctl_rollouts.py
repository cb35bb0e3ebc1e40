"""Rollouts as kubectl shows them: status, history, undo, restart, pause, deadlines, quotas, budgets."""

import json
from pathlib import Path

from pagefleet_localcluster.client import DEPLOYMENTS, DISRUPTION_BUDGETS, PODS, REPLICA_SETS, Client
from pagefleet_localcluster.client import RESOURCE_QUOTAS as QUOTAS
from pagefleet_localcluster.controllers.deployment_plan import template_hash
from pagefleet_localcluster.objects import Object, condition_of
from support.local_cluster import (
    container,
    create,
    deployment,
    events_of,
    eventually,
    kubectl,
    pods,
    ready_pods,
    ready_probe,
    rolled_out,
    running_cluster,
)


def web(*args: str, replicas: int = 2, **fields: object) -> Object:
    spec = {"containers": [container(*args)]}
    return deployment("web", spec, replicas=replicas, **fields)


async def condition(client: Client, kind: str) -> Object | None:
    return condition_of(await client.get(DEPLOYMENTS, "web", "default"), kind)


async def test_history_undo_and_restart(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        await create(client, DEPLOYMENTS, web("--say", "one"))
        code, text = await kubectl(cluster, "rollout", "status", "deploy/web", "--timeout=20s")
        assert code == 0 and text.endswith('deployment "web" successfully rolled out\n')
        [first] = (await client.list(REPLICA_SETS, "default"))["items"]
        assert (await kubectl(cluster, "rollout", "restart", "deploy/web"))[1] == "deployment.apps/web restarted\n"
        code, text = await kubectl(cluster, "rollout", "status", "deploy/web", "--timeout=20s")
        assert code == 0, text
        _, text = await kubectl(cluster, "rollout", "history", "deploy/web")
        assert [line.split() for line in text.splitlines()[2:4]] == [["1", "<none>"], ["2", "<none>"]]
        assert (await kubectl(cluster, "rollout", "undo", "deploy/web"))[1] == "deployment.apps/web rolled back\n"
        done = await rolled_out(client, "web")
        assert done["metadata"]["annotations"]["deployment.kubernetes.io/revision"] == "3"
        sizes = {
            rs["metadata"]["name"]: rs["spec"]["replicas"]
            for rs in (await client.list(REPLICA_SETS, "default"))["items"]
        }
        assert sizes[first["metadata"]["name"]] == 2 and sorted(sizes.values()) == [0, 2]
        _, text = await kubectl(cluster, "rollout", "history", "deploy/web", "-o", "json")
        _, text = await kubectl(cluster, "rollout", "history", "deploy/web")
        assert [line.split()[0] for line in text.splitlines()[2:4]] == ["2", "3"]


async def test_paused_rollouts_wait(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        await create(client, DEPLOYMENTS, web())
        await rolled_out(client, "web")
        await kubectl(cluster, "rollout", "pause", "deploy/web")

        async def paused() -> bool:
            found = await condition(client, "Progressing")
            return found is not None and found["reason"] == "DeploymentPaused"

        await eventually(paused)
        patch = {"spec": {"template": {"metadata": {"annotations": {"round": "2"}}}, "replicas": 1}}
        await client.patch(DEPLOYMENTS, "web", patch, "default")
        await ready_pods(client, "web", 1)
        assert len((await client.list(REPLICA_SETS, "default"))["items"]) == 1
        await kubectl(cluster, "rollout", "resume", "deploy/web")
        done = await rolled_out(client, "web")
        assert done["metadata"]["annotations"]["deployment.kubernetes.io/revision"] == "2"


async def test_a_rollout_that_does_not_progress_says_so(tmp_path: Path) -> None:
    """The old pods stay; kubectl gives up with the reason; a good template recovers."""
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        strategy = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
        spec = {"containers": [container(readinessProbe=ready_probe())]}
        options = {"progressDeadlineSeconds": 3, "minReadySeconds": 1, "strategy": strategy}
        await create(client, DEPLOYMENTS, deployment("web", spec, replicas=2, **options))
        await rolled_out(client, "web")
        broken = [{"name": "server", "command": ["false"]}]
        patch = {"spec": {"template": {"spec": {"containers": broken}}}}
        await kubectl(cluster, "patch", "deploy/web", "-p", json.dumps(patch))
        code, text = await kubectl(cluster, "rollout", "status", "deploy/web", "--timeout=20s")
        assert (code, text.splitlines()[-1]) == (1, 'error: deployment "web" exceeded its progress deadline')
        found = await condition(client, "Progressing")
        assert found is not None and (found["status"], found["reason"]) == ("False", "ProgressDeadlineExceeded")
        d = await client.get(DEPLOYMENTS, "web", "default")
        assert d["status"]["availableReplicas"] == 2 and d["status"]["replicas"] == 3
        await kubectl(cluster, "rollout", "undo", "deploy/web")
        await rolled_out(client, "web")
        found = await condition(client, "Progressing")
        assert found is not None and found["reason"] == "NewReplicaSetAvailable"


async def test_a_quota_on_gpus_shows_as_replica_failure(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, gpus_per_node=4) as cluster:
        client = cluster.client
        quota = {"metadata": {"name": "gpus"}, "spec": {"hard": {"requests.nvidia.com/gpu": "1"}}}
        await create(client, QUOTAS, quota)
        spec = {"containers": [container(resources={"limits": {"nvidia.com/gpu": "1"}})]}
        await create(client, DEPLOYMENTS, deployment("web", spec, replicas=2))
        await ready_pods(client, "web", 1)

        async def failing() -> Object | None:
            return await condition(client, "ReplicaFailure")

        found = await eventually(failing)
        assert (found["status"], found["reason"]) == ("True", "FailedCreate")
        assert "exceeded quota: gpus, requested: requests.nvidia.com/gpu=1" in found["message"]
        assert (await events_of(client, "web-"))["FailedCreate"].startswith("Error creating: pods ")

        async def counted() -> bool:
            used = (await client.get(QUOTAS, "gpus", "default"))["status"]["used"]
            return bool(used == {"requests.nvidia.com/gpu": "1"})

        await eventually(counted)
        await client.patch(QUOTAS, "gpus", {"spec": {"hard": {"requests.nvidia.com/gpu": "2"}}}, "default")
        await ready_pods(client, "web", 2)

        async def cured() -> bool:
            return await condition(client, "ReplicaFailure") is None

        await eventually(cured)


async def test_a_budget_counts_and_holds_evictions_back(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        await create(client, DEPLOYMENTS, web())
        spec = {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "web"}}}
        await create(client, DISRUPTION_BUDGETS, {"metadata": {"name": "web"}, "spec": spec})
        found = await ready_pods(client, "web", 2)

        async def allowed(count: int) -> None:
            async def probe() -> bool:
                budget = await client.get(DISRUPTION_BUDGETS, "web", "default")
                return bool(budget["status"]["disruptionsAllowed"] == count)

            await eventually(probe)

        await allowed(1)
        name = found[0]["metadata"]["name"]
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": "default"}}
        await client.request("POST", PODS.path("default", name, "eviction"), body=eviction)

        async def replaced() -> bool:
            return name not in {p["metadata"]["name"] for p in await pods(client, "web")}

        await eventually(replaced)
        await ready_pods(client, "web", 2)
        await allowed(1)


async def test_a_name_that_is_taken_is_passed_over(tmp_path: Path) -> None:
    """A foreign ReplicaSet under the wanted name counts as a collision of hashes."""
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        paused = await create(client, DEPLOYMENTS, web(paused=True))
        taken = f"web-{template_hash(paused)}"
        labels = {"app": "foreign"}
        template = {"metadata": {"labels": labels}, "spec": {"containers": [container()]}}
        spec = {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}
        await create(client, REPLICA_SETS, {"metadata": {"name": taken}, "spec": spec})
        await client.patch(DEPLOYMENTS, "web", {"spec": {"paused": False}}, "default")
        done = await rolled_out(client, "web")
        assert done["status"]["collisionCount"] == 1
        sizes = {
            rs["metadata"]["name"]: rs["spec"]["replicas"]
            for rs in (await client.list(REPLICA_SETS, "default"))["items"]
        }
        assert sizes == {taken: 0, f"web-{template_hash(done)}": 2}


async def test_old_revisions_are_forgotten(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        await create(client, DEPLOYMENTS, web(replicas=1, revisionHistoryLimit=1))
        for number in range(3):
            await rolled_out(client, "web")
            patch = {"spec": {"template": {"metadata": {"annotations": {"round": str(number)}}}}}
            await client.patch(DEPLOYMENTS, "web", patch, "default")

        async def two_left() -> bool:
            sets = (await client.list(REPLICA_SETS, "default"))["items"]
            revisions = [rs["metadata"]["annotations"]["deployment.kubernetes.io/revision"] for rs in sets]
            return sorted(revisions) == ["3", "4"]

        await eventually(two_left)


async def test_orphans_are_adopted_and_strangers_released(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        await create(client, DEPLOYMENTS, web())
        found = await ready_pods(client, "web", 2)
        name = found[0]["metadata"]["name"]
        await client.patch(PODS, name, {"metadata": {"labels": {"app": "elsewhere"}}}, "default")
        await ready_pods(client, "web", 2)

        async def released() -> bool:
            return not (await client.get(PODS, name, "default"))["metadata"].get("ownerReferences")

        await eventually(released)
        await client.patch(PODS, name, {"metadata": {"labels": {"app": "web"}}}, "default")

        async def one_too_many_is_gone() -> bool:
            now = await pods(client, "web")
            return len(now) == 2 and all(p["metadata"].get("ownerReferences") for p in now)

        await eventually(one_too_many_is_gone)
