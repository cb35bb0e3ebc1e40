"""A running local cluster for tests: apply, poll, ask."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from pagefleet_localcluster.client import DEPLOYMENTS, EVENTS, PODS, SERVICES, ApiError, Client, Resource
from pagefleet_localcluster.launcher import ClusterSettings, LocalCluster
from pagefleet_localcluster.objects import Object, is_deleted, is_pod_ready

T = TypeVar("T")
DEADLINE_SECONDS = 90.0
SERVER = str(Path(__file__).with_name("tiny_server.py"))
KUBECTL = str(Path(sys.executable).with_name("kubectl"))
FAST_NODE = {"backoff_min_seconds": 0.1, "backoff_max_seconds": 1.0, "stop_seconds": 2.0}


@asynccontextmanager
async def running_cluster(folder: Path, **settings: Any) -> AsyncIterator[LocalCluster]:
    options = {**FAST_NODE, **settings.pop("node_options", {})}
    async with LocalCluster(ClusterSettings(folder, node_options=options, **settings)) as cluster:
        yield cluster


async def eventually(probe: Callable[[], Awaitable[T | None]], seconds: float = DEADLINE_SECONDS) -> T:
    """Poll until `probe()` returns something true without raising; its last words when it never does."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        last: object = None
        try:
            if result := await probe():
                return result
            last = result
        except (ApiError, aiohttp.ClientError, OSError, AssertionError, LookupError) as error:
            last = error
        if loop.time() > deadline:
            raise AssertionError(f"not within {seconds} s; last: {last!r}")
        await asyncio.sleep(0.02)


def container(*args: str, name: str = "server", **fields: Any) -> Object:
    return {
        "name": name,
        "image": "python:3",
        "command": ["python", "-I", "-S", SERVER],
        "args": list(args),
        "ports": [{"name": "http", "containerPort": 8000}],
        **fields,
    }


def ready_probe(path: str = "/ready", **fields: Any) -> Object:
    return {"httpGet": {"path": path, "port": "http"}, "periodSeconds": 1, "failureThreshold": 1, **fields}


def deployment(name: str, spec: Object, *, replicas: int = 1, **fields: Any) -> Object:
    labels = {"app": name}
    return {
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"terminationGracePeriodSeconds": 1, **spec}},
            **fields,
        },
    }


async def create(client: Client, resource: Resource, body: Object) -> Object:
    return await client.create(resource, body, "default")


async def pods(client: Client, app: str) -> list[Object]:
    """The pods of an app that are not being deleted, by name."""
    items = (await client.list(PODS, "default", labelSelector=f"app={app}"))["items"]
    return sorted((p for p in items if not is_deleted(p)), key=lambda p: str(p["metadata"]["name"]))


async def ready_pods(client: Client, app: str, count: int) -> list[Object]:
    """Wait until exactly `count` pods are there and ready."""

    async def probe() -> list[Object] | None:
        found = await pods(client, app)
        return found or [{}] if len(found) == count and all(map(is_pod_ready, found)) else None

    return await eventually(probe)


async def rolled_out(client: Client, name: str) -> Object:
    """Wait as `kubectl rollout status` does."""

    async def probe() -> Object | None:
        d = await client.get(DEPLOYMENTS, name, "default")
        status, wanted = d["status"], d["spec"]["replicas"]
        counts = [status.get(k, 0) for k in ("updatedReplicas", "replicas", "availableReplicas")]
        done = counts == [wanted] * 3 and status.get("observedGeneration", 0) >= d["metadata"]["generation"]
        return d if done else None

    return await eventually(probe)


async def events_of(client: Client, name: str) -> dict[str, str]:
    """reason -> message of the events about objects whose name starts so."""
    items = (await client.list(EVENTS, "default"))["items"]
    return {e["reason"]: e["message"] for e in items if e["involvedObject"]["name"].startswith(name)}


async def get(url: str) -> str:
    """A GET on a fresh connection. Raises aiohttp.ClientError."""
    async with aiohttp.ClientSession() as session, session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as answer:
        return await answer.text()


async def service_url(client: Client, name: str) -> str:
    spec = (await client.get(SERVICES, name, "default"))["spec"]
    port = spec["ports"][0]["port"]
    return f"http://{spec['clusterIP']}:{port if os.geteuid() == 0 or port >= 1024 else port + 10000}"


async def kubectl(cluster: LocalCluster, *words: str, stdin: bytes | None = None) -> tuple[int, str]:
    """(exit code, stdout and stderr)."""
    environment = {
        "KUBECONFIG": str(cluster.kubeconfig_path),
        "HOME": str(cluster.settings.directory),
        "PATH": "/usr/bin:/bin",
    }
    process = await asyncio.create_subprocess_exec(
        KUBECTL,
        *words,
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate(stdin)
    return process.returncode or 0, output.decode()
