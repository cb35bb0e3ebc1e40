"""The local cluster's budget: ready in 1 s, 150 MiB with 50 pods, 1,000 objects listed in 100 ms,
200 status writes a second without growing.

python benchmarks/local_cluster.py [--pods 50] [--objects 1000] [--writes-per-second 200] [--seconds 60]
"""

import argparse
import asyncio
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml

from pagefleet_localcluster.client import DEPLOYMENTS, Client, Resource
from pagefleet_localcluster.kubeconfig import Kubeconfig

ROOT = Path(__file__).resolve().parents[1]
CRDS = Resource("apiextensions.k8s.io/v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False)
LLMDS = Resource("pagefleet.dev/v1alpha1", "llmdeployments", "LLMDeployment")
LOCAL = [sys.executable, "-m", "pagefleet_localcluster.main"]
GOALS = {
    "ready (s)": 1.0,
    "memory, 50 pods (MiB)": 150.0,
    "list of 1,000 (ms)": 100.0,
    "write latency p99 (ms)": 1000.0,
    "growth over the writes (MiB)": 48.0,
}
"""The last one: a watch window of 16 MiB of text per collection, as Python holds it."""


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)


async def until(probe: Callable[[], Awaitable[bool]], seconds: float = 120.0) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + seconds
    while not await probe():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s")
        await asyncio.sleep(0.05)


async def start_pods(client: Client, count: int) -> float:
    """Seconds until a Deployment of so many sleeping pods is available."""
    labels = {"app": "sleep"}
    container = {"name": "c", "image": "busybox", "command": ["sleep", "100000"]}
    body = {
        "metadata": {"name": "sleep"},
        "spec": {
            "replicas": count,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
            },
        },
    }
    began = time.monotonic()
    await client.create(DEPLOYMENTS, body, "default")

    async def available() -> bool:
        status = (await client.get(DEPLOYMENTS, "sleep", "default"))["status"]
        return bool(status.get("availableReplicas") == count)

    await until(available)
    return time.monotonic() - began


async def fill(client: Client, count: int) -> float:
    """Create so many LLMDeployments; the best of five lists, in milliseconds."""
    crd = yaml.safe_load((ROOT / "crds" / "llmdeployment.yaml").read_text())
    await client.create(CRDS, crd)

    async def served() -> bool:
        found = await client.get(CRDS, crd["metadata"]["name"])
        return any(c["type"] == "Established" and c["status"] == "True" for c in found["status"]["conditions"])

    await until(served)
    for number in range(count):
        body = {"metadata": {"name": f"m{number}"}, "spec": {"model": {"source": "file:///models/m"}}}
        await client.create(LLMDS, body, "default")
    times = []
    for _ in range(5):
        began = time.monotonic()
        assert len((await client.list(LLMDS, "default"))["items"]) == count
        times.append(time.monotonic() - began)
    return min(times) * 1000


async def write_statuses(client: Client, count: int, rate: int, seconds: int) -> tuple[float, float]:
    """(writes a second reached, p99 latency in ms) of status patches spread evenly over the objects."""
    latencies: list[float] = []

    async def write(number: int) -> None:
        began = time.monotonic()
        status = {"status": {"replicas": number % 7, "kvBlocks": {"used": number, "total": 100_000}}}
        await client.patch(LLMDS, f"m{number % count}", status, "default", subresource="status")
        latencies.append(time.monotonic() - began)

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(rate * seconds):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            group.create_task(write(number))
    reached = rate * seconds / (time.monotonic() - began)
    return reached, sorted(latencies)[int(len(latencies) * 0.99)] * 1000


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """All numbers of one cluster, started as users start it."""
    began = time.monotonic()
    cluster = await asyncio.create_subprocess_exec(*LOCAL, "up", "--dir", str(folder), stdout=asyncio.subprocess.PIPE)
    pid = cluster.pid
    numbers: dict[str, Any] = {}
    try:
        assert cluster.stdout is not None
        await cluster.stdout.readuntil(b"KUBECONFIG")
        numbers["ready (s)"] = time.monotonic() - began
        numbers["memory, empty (MiB)"] = memory_mib(pid)
        async with Client(Kubeconfig.load(folder / "kubeconfig")) as client:
            numbers[f"{options.pods} pods available (s)"] = await start_pods(client, options.pods)
            numbers[f"memory, {options.pods} pods (MiB)"] = memory_mib(pid)
            numbers[f"list of {options.objects:,} (ms)"] = await fill(client, options.objects)
            await write_statuses(client, options.objects, options.writes_per_second, max(1, options.seconds // 6))
            before = memory_mib(pid)
            reached, p99 = await write_statuses(client, options.objects, options.writes_per_second, options.seconds)
            numbers["status writes (1/s)"] = reached
            numbers["write latency p99 (ms)"] = p99
            numbers["growth over the writes (MiB)"] = memory_mib(pid) - before
    finally:
        began = time.monotonic()
        cluster.terminate()
        await cluster.communicate()
        numbers["down (s)"] = time.monotonic() - began
    return numbers


def main() -> None:
    """Print the table; exit with 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=50)
    parser.add_argument("--objects", type=int, default=1000)
    parser.add_argument("--writes-per-second", type=int, default=200)
    parser.add_argument("--seconds", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        numbers = asyncio.run(measure(options, Path(folder)))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    print(f"commit {commit.stdout.strip()}, {platform.machine()}, Python {platform.python_version()}")
    missed = False
    for name, value in numbers.items():
        goal = GOALS.get(name)
        missed |= goal is not None and value > goal
        print(f"{name:32} {value:8.1f}" + (f"   goal {goal:g}{'  MISSED' if value > goal else ''}" if goal else ""))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
