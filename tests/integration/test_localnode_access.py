"""How one reaches a pod on its node: logs, commands, its status, and who may not."""

import asyncio
import json
from pathlib import Path

import aiohttp

from pagefleet_localcluster.client import NODES, PODS
from pagefleet_localcluster.objects import is_pod_ready
from support.local_cluster import create, eventually, kubectl, running_cluster
from support.localnode_pods import pod, reached, shell


async def test_logs_and_exec_through_kubectl(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        client = cluster.client
        await create(client, PODS, pod("p", shell("c", "for i in 1 2 3; do echo line $i; done; sleep 100")))

        async def ready() -> bool:
            return is_pod_ready(await client.get(PODS, "p", "default"))

        await eventually(ready)

        async def logged() -> bool:
            return await kubectl(cluster, "logs", "p") == (0, "line 1\nline 2\nline 3\n")

        await eventually(logged)
        assert await kubectl(cluster, "logs", "p", "--tail=2") == (0, "line 2\nline 3\n")
        assert await kubectl(cluster, "logs", "p", "--limit-bytes=4") == (0, "line")
        code, text = await kubectl(cluster, "logs", "p", "--since=1h")
        assert code == 1 and "keeps no times of log lines" in text
        code, text = await kubectl(cluster, "logs", "p", "--previous")
        assert code == 1 and 'previous terminated container "c" in pod "p" not found' in text
        follower = asyncio.create_task(kubectl(cluster, "logs", "-f", "p"))
        code, text = await kubectl(cluster, "exec", "p", "--", "sh", "-c", "echo out; echo err >&2; pwd; exit 3")
        assert code == 3 and {"out", "err", "command terminated with exit code 3"} <= set(text.splitlines())
        assert str(tmp_path) in text
        assert await kubectl(cluster, "exec", "-i", "p", "--", "wc", "-c", stdin=bytes(300_000)) == (0, "300000\n")
        await client.delete(PODS, "p", "default")
        assert await follower == (0, "line 1\nline 2\nline 3\n")


async def test_a_node_serves_nobody_but_its_api_server(tmp_path: Path) -> None:
    """Another user of the machine can reach the port: neither logs nor commands for them."""
    async with running_cluster(tmp_path) as cluster:
        await create(cluster.client, PODS, pod("p", shell("c", "echo secret; sleep 100")))
        await reached(cluster.client, "p", "Running")
        port = (await cluster.client.get(NODES, "local-0"))["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
        async with aiohttp.ClientSession() as session:
            for path in ("containerLogs/default/p/c", "exec/default/p/c?command=id", "containerLogs/default/none/c"):
                for headers in ({}, {"Authorization": "Bearer guess"}):
                    async with session.get(f"http://127.0.0.1:{port}/{path}", headers=headers) as answer:
                        assert answer.status == 401 and "secret" not in await answer.text()
        assert (await kubectl(cluster, "logs", "p"))[0] == 0


async def test_a_pod_keeps_its_status_through_the_eyes_of_kubectl(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, node_options={"backoff_min_seconds": 60.0}) as cluster:
        await create(cluster.client, PODS, pod("p", shell("c", "exit 5")))

        async def backing_off() -> bool:
            _, text = await kubectl(cluster, "get", "pod", "p", "--no-headers")
            return "CrashLoopBackOff" in text and text.split()[1] == "0/1"

        await eventually(backing_off)
        _, text = await kubectl(cluster, "get", "pod", "p", "-o", "json")
        status = json.loads(text)["status"]
        assert status["phase"] == "Running"
        assert status["containerStatuses"][0]["lastState"]["terminated"]["exitCode"] == 5
        message = status["containerStatuses"][0]["state"]["waiting"]["message"]
        assert message.startswith("back-off ") and "restarting failed container=c pod=p_default(" in message
