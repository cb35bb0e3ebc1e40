"""A cluster for the operator: the embedded API, its controllers, a node whose pods are small metric servers.

The operator itself is the real process, `pagefleet-operator`.
"""

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml
from aiohttp import web

from pagefleet_localcluster.client import NODES, PODS, ApiError, Client, Resource
from pagefleet_localcluster.kubeconfig import Kubeconfig
from pagefleet_localcluster.launcher import ClusterSettings, LocalCluster
from pagefleet_localcluster.reflector import Reflector
from support.operator_objects import metrics_text
from support.recording_proxy import RecordingProxy
from support.serving_end import end_serving

ROOT = Path(__file__).resolve().parents[2]
LLMDS = Resource("pagefleet.dev/v1alpha1", "llmdeployments", "LLMDeployment")
CRDS = Resource("apiextensions.k8s.io/v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False)
EVENTS = Resource("v1", "events", "Event")
NETWORK_POLICIES = Resource("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy")
POD_MONITORS = Resource("monitoring.coreos.com/v1", "podmonitors", "PodMonitor")
POD_MONITOR_CRD: dict[str, Any] = {
    "metadata": {"name": "podmonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "scope": "Namespaced",
        "names": {
            "plural": "podmonitors",
            "singular": "podmonitor",
            "kind": "PodMonitor",
            "listKind": "PodMonitorList",
        },
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {"spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
                    }
                },
            }
        ],
    },
}
"""The kind that the Prometheus operator installs, without its schema."""
Json = dict[str, Any]


@dataclass
class StubNode:
    """Runs a pod as one metrics endpoint on its own loopback address."""

    client: Client
    loads: dict[str, Json] = field(default_factory=dict)
    """Keywords of metrics_text by pod, or else by LLMDeployment."""
    answers: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = field(default_factory=dict)
    """Answers a scrape of a pod of this LLMDeployment instead of the metrics."""
    downloads: dict[str, tuple[int, int]] = field(default_factory=dict)
    """New pods of this LLMDeployment have so many bytes of so many, and start when they have all."""
    crashes: dict[str, str] = field(default_factory=dict)
    """New pods of this LLMDeployment crash with this termination message."""
    missing_images: set[str] = field(default_factory=set)
    """Images that cannot be pulled."""
    exit_code: int = 3
    """Of what crashes."""
    scrapes: Counter[str] = field(default_factory=Counter)
    """How often pods of each LLMDeployment were asked for their metrics."""
    addresses: Iterator[str] | None = None
    """New pods get these, and somebody else answers there."""
    _runners: dict[str, web.AppRunner] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _started: set[str] = field(default_factory=set)
    _ending: set[str] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        await self.client.create(NODES, {"metadata": {"name": "stub"}, "spec": {}})
        status = {
            "capacity": {"cpu": "64", "memory": "64Gi", "pods": "500"},
            "allocatable": {"cpu": "64", "memory": "64Gi", "pods": "500"},
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}],
        }
        await self.client.patch(NODES, "stub", {"status": status}, subresource="status")
        reflector = Reflector(self.client, PODS)
        reflector.listeners.append(self._changed)
        self._watch = asyncio.create_task(reflector.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert not self._watch.done()
        self._watch.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self._watch, *self._tasks, return_exceptions=True)
        for runner in self._runners.values():
            await end_serving(runner)

    def _changed(self, old: Json | None, new: Json | None) -> None:
        if new is None:
            return
        uid = new["metadata"]["uid"]
        if new["metadata"].get("deletionTimestamp"):
            if uid not in self._ending:
                self._ending.add(uid)
                self._spawn(self._end(new))
        elif new["spec"].get("nodeName") and uid not in self._started:
            self._started.add(uid)
            self._spawn(self._start(new))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, pod: Json) -> None:
        name = pod["metadata"]["name"]
        owner = pod["metadata"]["labels"]["pagefleet.dev/llmdeployment"]
        if owner in self.crashes:
            ended = {"exitCode": self.exit_code, "reason": "Error", "message": self.crashes[owner]}
            state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
            await self._report(pod, "Running", None, ready=False, state=state, last={"terminated": ended})
            return
        image = pod["spec"]["containers"][0]["image"]
        if image in self.missing_images:
            waiting = {"reason": "ImagePullBackOff", "message": f"Back-off pulling image {image}"}
            await self._report(pod, "Pending", None, ready=False, state={"waiting": waiting})
            return
        address = await self._listen(name, owner)
        await self._report(pod, "Running", address, ready=False, state={"running": {}})
        while owner in self.downloads and self.downloads[owner][0] < self.downloads[owner][1]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await self._report(pod, "Running", address, ready=True, state={"running": {}})

    async def crash(self, pod: Json, message: str) -> None:
        """The server of a pod that ran dies; its container starts again and is not ready yet."""
        runner = self._runners.pop(pod["metadata"]["name"])
        await end_serving(runner)
        ended = {"exitCode": 139, "reason": "Error", "message": message}
        state: Json = {"running": {}}
        await self._report(pod, "Running", pod["status"]["podIP"], ready=False, state=state, last={"terminated": ended})

    async def recover(self, pod: Json) -> None:
        """It serves again."""
        await self._start(pod)

    async def _listen(self, name: str, owner: str) -> str:
        if self.addresses is not None:
            return next(self.addresses)

        async def metrics(request: web.Request) -> web.StreamResponse:
            self.scrapes[owner] += 1
            if owner in self.answers:
                return await self.answers[owner](request)
            if owner in self.downloads:
                done, total = self.downloads[owner]
                text = f"pagefleet_model_download_bytes {done}\npagefleet_model_download_total_bytes {total}\n"
                return web.Response(text=text + metrics_text())
            return web.Response(text=metrics_text(**self.loads.get(name, self.loads.get(owner, {}))))

        app = web.Application()
        app.router.add_get("/metrics", metrics)
        for _ in range(100):
            address = f"127.{random.randint(128, 250)}.{random.randint(0, 250)}.{random.randint(2, 250)}"
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            try:
                await web.TCPSite(runner, address, 8000).start()
            except OSError:
                await runner.cleanup()
                continue
            self._runners[name] = runner
            return address
        raise RuntimeError("no free loopback address")

    async def _report(
        self, pod: Json, phase: str, address: str | None, *, ready: bool, state: Json, last: Json | None = None
    ) -> None:
        metadata = pod["metadata"]
        container = {
            "name": "server",
            "image": "stub",
            "imageID": "stub",
            "ready": ready,
            "restartCount": 3 if last else 0,
            "state": state,
            **({"lastState": last} if last else {}),
        }
        conditions = [
            {"type": kind, "status": "True" if ready or kind == "PodScheduled" else "False"}
            for kind in ("PodScheduled", "ContainersReady", "Ready")
        ]
        status: Json = {"phase": phase, "conditions": conditions, "containerStatuses": [container]}
        if address is not None:
            status |= {"podIP": address, "podIPs": [{"ip": address}]}
        with contextlib.suppress(ApiError):  # deleted meanwhile
            await self.client.patch(
                PODS, metadata["name"], {"status": status}, metadata["namespace"], subresource="status"
            )

    async def _end(self, pod: Json) -> None:
        metadata = pod["metadata"]
        runner = self._runners.pop(metadata["name"], None)
        if runner is not None:
            await end_serving(runner)
        with contextlib.suppress(ApiError):
            await self.client.delete(
                PODS, metadata["name"], metadata["namespace"], uid=metadata["uid"], grace_seconds=0
            )


LEASE_LOST = 2
"""Exit code."""
SHIPPED = "from pagefleet_operator.main import main; main()"
QUICK = """
from dataclasses import replace
from pagefleet_operator import main

def quick(*given, shipped=main.operator_settings):
    settings = shipped(*given)
    return replace(settings, scrape=replace(settings.scrape, period_seconds=0.5, stale_after_periods=10.0))

main.operator_settings = quick
main.main()
"""
"""As it is shipped but for a round each half second instead of each two: tests wait for rounds most of their time."""


@dataclass
class OperatorProcess:
    """The real operator against the proxy."""

    kubeconfig: Path
    log: Path
    arguments: tuple[str, ...] = ()
    program: str = QUICK
    is_supervised: bool = False
    """Whether one that lost its lease, as happens on a busy machine, is started again while a test waits."""
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                self.program,
                *self.arguments,
                env={**os.environ, "KUBECONFIG": str(self.kubeconfig), "PAGEFLEET_SERVER_IMAGE": "stub:1"},
                stdout=log,
                stderr=log,
            )

    async def supervise(self) -> None:
        """What a Deployment does about an operator whose lease is lost."""
        if self.is_supervised and self.process is not None and self.process.returncode == LEASE_LOST:
            await self.start()

    async def stop(self, sign: signal.Signals = signal.SIGTERM) -> int | None:
        if self.process is None or self.process.returncode is not None:
            return self.process.returncode if self.process else None
        self.process.send_signal(sign)
        try:
            async with asyncio.timeout(60):
                return await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
            raise AssertionError(f"the operator did not end: {self.log.read_text()[-3000:]}") from None


@dataclass
class OperatorCluster:
    """All of it, running."""

    client: Client
    proxy: RecordingProxy
    node: StubNode
    operator: OperatorProcess

    async def create(self, spec: Json, name: str = "chat") -> Json:
        body = {"metadata": {"name": name, "namespace": "default"}, "spec": {"model": {"source": "file:///m"}, **spec}}
        return await self.client.create(LLMDS, body, "default")

    async def get(self, resource: Resource = LLMDS, name: str = "chat") -> Json | None:
        try:
            return await self.client.get(resource, name, "default")
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def pods(self, name: str = "chat") -> list[Json]:
        """Pods of the LLMDeployment that are not leaving."""
        found = await self.client.list(PODS, "default", labelSelector=f"pagefleet.dev/llmdeployment={name}")
        return [item for item in found["items"] if not item["metadata"].get("deletionTimestamp")]

    async def llmd(self, name: str = "chat") -> Json:
        found = await self.get(LLMDS, name)
        assert found is not None
        return found

    async def events(self, name: str = "chat") -> list[str]:
        """Reasons of the Events about the LLMDeployment."""
        items = (await self.client.list(EVENTS, "default"))["items"]
        about = [item for item in items if item["involvedObject"]["kind"] == "LLMDeployment"]
        return [item["reason"] for item in about if item["involvedObject"]["name"] == name]

    async def kubectl(self, *arguments: str) -> str:
        """What it prints, asking the API server itself."""
        command = Path(sys.executable).with_name("kubectl")
        server = ("--server", self.proxy.upstream, "-n", "default")
        process = await asyncio.create_subprocess_exec(command, *server, *arguments, stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        assert process.returncode == 0
        return out.decode()

    async def until(self, check: Callable[[], Any], what: str, *, seconds: float = 90.0) -> Any:
        """Poll an async condition until it is truthy."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = await check()
            if found:
                return found
            await self.operator.supervise()
            await asyncio.sleep(0.05)
        state = yaml.safe_dump((await self.client.list(LLMDS, "default"))["items"])
        raise AssertionError(f"{what}: not within {seconds} s\n{state}\n{self.operator.log.read_text()[-4000:]}")

    async def scraped(self, name: str, times: int) -> None:
        """Returns when the one pod of the LLMDeployment has been scraped so many more times: so many rounds of
        decisions, the last one's apart, have been made."""
        before = self.node.scrapes[name]

        async def asked() -> bool:
            return self.node.scrapes[name] >= before + times

        await self.until(asked, f"{name} is scraped {times} more times", seconds=30)

    async def condition(
        self, kind: str, status: str, *, name: str = "chat", reason: str | None = None, **limit: float
    ) -> Json:
        async def check() -> Json | None:
            for item in (await self.llmd(name)).get("status", {}).get("conditions", []):
                if item["type"] == kind and item["status"] == status and reason in (None, item["reason"]):
                    found: Json = item
                    return found
            return None

        found: Json = await self.until(check, f"{name} {kind}={status} {reason or ''}", **limit)
        return found


@contextlib.asynccontextmanager
async def operator_cluster(
    folder: Path, *arguments: str, start: bool = True, through_proxy: bool = True
) -> AsyncIterator[OperatorCluster]:
    """Everything up, with the CRD installed; the operator too unless `start` is False.

    `through_proxy`: its requests go through the recording proxy; for timings they do not, and nothing is quicker.
    """
    settings = ClusterSettings(folder / "cluster", nodes=0, node_grace_seconds=1e9)
    async with LocalCluster(settings) as cluster:
        upstream = Kubeconfig.load(cluster.kubeconfig_path).server
        async with RecordingProxy(upstream) as proxy, StubNode(cluster.client) as node:
            await cluster.client.create(CRDS, yaml.safe_load((ROOT / "crds" / "llmdeployment.yaml").read_text()))
            kubeconfig = folder / "kubeconfig"
            Kubeconfig(proxy.url if through_proxy else upstream).write(kubeconfig, name="test")
            program = QUICK if through_proxy else SHIPPED
            operator = OperatorProcess(kubeconfig, folder / "operator.log", arguments, program)
            try:
                if start:
                    await operator.start()
                yield OperatorCluster(cluster.client, proxy, node, operator)
            finally:
                await operator.stop()
