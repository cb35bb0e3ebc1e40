"""One process node: registers itself, beats, and runs the pods that are bound to it."""

import asyncio
import contextlib
import logging
import os
import platform
import random
import time
from pathlib import Path

import aiohttp

from pagefleet_localcluster.client import LEASES, NODES, PODS, UNREACHABLE, ApiError, Client
from pagefleet_localcluster.event_recorder import EventRecorder
from pagefleet_localcluster.node.addresses import GPU, AddressPool, gpus_for
from pagefleet_localcluster.node.kubelet_server import KubeletServer
from pagefleet_localcluster.node.pod import PodServices, PodWorker
from pagefleet_localcluster.node.pod_inputs import HOST_ADDRESS
from pagefleet_localcluster.node.process import end_stale
from pagefleet_localcluster.node.settings import NodeSettings
from pagefleet_localcluster.node.volumes import remove_volumes
from pagefleet_localcluster.objects import (
    Object,
    format_micro_time,
    format_time,
    is_deleted,
    is_pod_finished,
    key_of,
    name_of,
)
from pagefleet_localcluster.reflector import Reflector

logger = logging.getLogger(__name__)

LEASE_NAMESPACE = "kube-node-lease"
SLOT_POLL_SECONDS = 0.02


class Node:
    """Runs until cancelled; `close()` then ends its pods' processes within `stop_seconds`."""

    def __init__(self, settings: NodeSettings, client: Client, *, rng: random.Random) -> None:
        self.settings = settings
        self._client = client
        self._addresses = AddressPool(settings.index, rng)
        self._gpu_slots = range(settings.index * settings.gpus, (settings.index + 1) * settings.gpus)
        self.workers: dict[str, PodWorker] = {}
        """Pod uid -> its worker."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._events = EventRecorder(client, "kubelet", host=settings.name)
        self._reflector = Reflector(client, PODS, {"fieldSelector": f"spec.nodeName={settings.name}"})
        self._reflector.listeners.append(self._pod_changed)
        self._server = KubeletServer(self, client.node_token)
        self._http: aiohttp.ClientSession | None = None

    async def run(self) -> None:
        """Clean up after a crash, register, then follow the pods until cancelled."""
        stale = end_stale(self.settings.directory)
        if stale:
            logger.warning("node %s: ended %d stale processes", self.settings.name, len(stale))
        remove_volumes(self.settings.directory / "pods")
        self.settings.directory.mkdir(parents=True, exist_ok=True)
        await self._server.start()
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        await self._register()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat())
            group.create_task(self._reflector.run())
            group.create_task(self._events.run())
            group.create_task(self._trim_logs())

    async def close(self) -> None:
        """End every pod's processes: SIGTERM, and SIGKILL after `stop_seconds`. Their objects stay as they are."""
        self._reflector.listeners.clear()
        tasks = list(self._tasks.values())
        for uid, task in self._tasks.items():
            if (worker := self.workers.get(uid)) is not None:
                worker.abandon(self.settings.stop_seconds)
            else:
                task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self.settings.stop_seconds + 3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.close()
        if self._http is not None:
            await self._http.close()

    @property
    def is_idle(self) -> bool:
        """Whether it runs nothing, and all addresses are free."""
        return not self.workers and not self._tasks and self._addresses.num_used == 0

    def find(self, namespace: str, name: str) -> PodWorker | None:
        """The worker of a pod by name."""
        return next(
            (
                worker
                for worker in self.workers.values()
                if worker.pod["metadata"]["namespace"] == namespace and name_of(worker.pod) == name
            ),
            None,
        )

    def _pod_changed(self, old: Object | None, new: Object | None) -> None:
        if new is None:
            if old is not None and (worker := self.workers.get(old["metadata"]["uid"])) and not worker.has_ended:
                self._tasks[old["metadata"]["uid"]].cancel()  # deleted by force: nothing is left to report
            return
        if (worker := self.workers.get(new["metadata"]["uid"])) is not None:
            worker.update(new)
        elif new["metadata"]["uid"] not in self._tasks and (not is_pod_finished(new) or is_deleted(new)):
            self._admit(new)

    def _admit(self, pod: Object) -> None:
        """Start a pod's worker with its own address and GPU slots; a finished pod's only confirms its deletion."""
        uid = pod["metadata"]["uid"]
        assert self._http is not None
        gpu_ids = self._gpus_for(pod)
        if gpu_ids is None:
            self._tasks[uid] = asyncio.get_running_loop().create_task(self._admit_later(pod))
            return
        services = PodServices(self.settings, self._client, self._http, self._say, self._capacity())
        worker = PodWorker(pod, services, address=self._addresses.take(), gpu_ids=gpu_ids)
        self.workers[uid] = worker
        self._tasks[uid] = asyncio.get_running_loop().create_task(self._run_pod(uid, worker))

    def _gpus_for(self, pod: Object) -> dict[str, list[int]] | None:
        """Free GPU slots by container; none for a pod that will run nothing; None when there are not enough."""
        if is_pod_finished(pod) or is_deleted(pod):
            return {}
        used = {slot for worker in self.workers.values() for slot in worker.gpu_slots}
        return gpus_for(pod, [slot for slot in self._gpu_slots if slot not in used])

    async def _admit_later(self, pod: Object) -> None:
        """For want of GPU slots: wait while pods that hold some are ending (the scheduler counts a slot as free as soon
        as its pod's object is gone, by force too), else fail the pod as a kubelet does."""
        try:
            while any(worker.gpu_slots and self._is_ending(worker.pod) for worker in self.workers.values()):
                await asyncio.sleep(SLOT_POLL_SECONDS)
                latest = self._current(pod)
                if latest is None:
                    return
                pod = latest
                if self._gpus_for(pod) is not None:
                    self._admit(pod)
                    return
            await self._refuse(pod)
        finally:
            if self._tasks.get(pod["metadata"]["uid"]) is asyncio.current_task():
                del self._tasks[pod["metadata"]["uid"]]

    def _current(self, pod: Object) -> Object | None:
        """The pod's newest version; None when it is gone."""
        found = self._reflector.objects.get(key_of(pod))
        return found if found is not None and found["metadata"]["uid"] == pod["metadata"]["uid"] else None

    def _is_ending(self, pod: Object) -> bool:
        latest = self._current(pod)
        return latest is None or is_deleted(latest) or is_pod_finished(latest)

    async def _run_pod(self, uid: str, worker: PodWorker) -> None:
        try:
            await worker.run()
        finally:
            self.workers.pop(uid, None)
            self._tasks.pop(uid, None)
            self._addresses.give_back(worker.address)

    async def _refuse(self, pod: Object) -> None:
        """Not enough GPU slots: someone bound the pod past the scheduler."""
        message = f"Pod was rejected: Allocate failed due to requested number of devices unavailable for {GPU}"
        self._say(pod, "Warning", "UnexpectedAdmissionError", message, "")
        status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": message}
        try:
            await self._client.patch(
                PODS, name_of(pod), {"status": status}, pod["metadata"]["namespace"], subresource="status"
            )
        except (ApiError, *UNREACHABLE) as error:
            logger.warning("refusing pod %s: %s", name_of(pod), error)

    def _say(self, pod: Object, type: str, reason: str, message: str, field: str) -> None:
        self._events.record(pod, "v1", "Pod", type=type, reason=reason, message=message, field=field)

    def _capacity(self) -> dict[str, str]:
        settings = self.settings
        return {
            "cpu": str(settings.cpus),
            "memory": f"{settings.memory_bytes // 1024}Ki",
            "pods": str(settings.max_pods),
            **({GPU: str(settings.gpus)} if settings.gpus else {}),
        }

    async def _register(self) -> None:
        """Create or update the Node object and its status; keep trying while there is no API server."""
        name = self.settings.name
        labels = {
            "kubernetes.io/hostname": name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
            "pagefleet.dev/node": "process",
        }
        backoff = 0.05
        while True:
            try:
                try:
                    await self._client.create(NODES, {"metadata": {"name": name, "labels": labels}, "spec": {}})
                except ApiError as error:
                    if error.code != 409:
                        raise
                await self._client.patch(NODES, name, {"status": self._node_status()}, subresource="status")
                await self._renew()
                return
            except (ApiError, *UNREACHABLE) as error:
                logger.warning("registering node %s: %s", name, error)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, 5.0)

    def _node_status(self) -> Object:
        now = format_time(time.time())
        healthy = {
            "MemoryPressure": ("False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
            "DiskPressure": ("False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
            "PIDPressure": ("False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
            "Ready": ("True", "KubeletReady", "kubelet is posting ready status"),
        }
        system = os.uname()
        return {
            "capacity": self._capacity(),
            "allocatable": self._capacity(),
            "addresses": [{"type": "InternalIP", "address": HOST_ADDRESS}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._server.port}},
            "declaredFeatures": ["ExtendWebSocketsToKubelet"],
            "conditions": [
                {
                    "type": kind,
                    "status": status,
                    "lastHeartbeatTime": now,
                    "lastTransitionTime": now,
                    "reason": reason,
                    "message": message,
                }
                for kind, (status, reason, message) in healthy.items()
            ],
            "nodeInfo": {
                "architecture": platform.machine(),
                "operatingSystem": "linux",
                "osImage": "processes of this machine",
                "kernelVersion": system.release,
                "kubeletVersion": "v1.36.2",
                "kubeProxyVersion": "",
                "containerRuntimeVersion": "process://1",
                "machineID": "",
                "systemUUID": "",
                "bootID": "",
            },
        }

    async def _renew(self) -> None:
        now = format_micro_time(time.time())
        spec = {"holderIdentity": self.settings.name, "leaseDurationSeconds": 40, "renewTime": now}
        try:
            await self._client.patch(LEASES, self.settings.name, {"spec": spec}, LEASE_NAMESPACE)
        except ApiError as error:
            if error.code != 404:
                raise
            metadata = {"name": self.settings.name, "namespace": LEASE_NAMESPACE}
            await self._client.create(LEASES, {"metadata": metadata, "spec": spec}, LEASE_NAMESPACE)

    async def _beat(self) -> None:
        """Renew the lease; report Ready again when the control plane had given the node up."""
        while True:
            await asyncio.sleep(self.settings.lease_seconds)
            try:
                await self._renew()
                node = await self._client.get(NODES, self.settings.name)
                conditions = node["status"].get("conditions") or ()
                if not any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
                    await self._client.patch(
                        NODES, self.settings.name, {"status": self._node_status()}, subresource="status"
                    )
            except ApiError as error:
                logger.warning("node %s: %s", self.settings.name, error)
                if error.code == 404:
                    await self._register()
            except UNREACHABLE as error:
                logger.debug("node %s: %s", self.settings.name, error)

    async def _trim_logs(self) -> None:
        """Cut every log beyond `log_bytes` to its newer half. Writers append, so they go on behind it."""
        while True:
            await asyncio.sleep(self.settings.lease_seconds)
            for log in (self.settings.directory / "pods").glob("*/containers/*/*.log"):
                with contextlib.suppress(FileNotFoundError):
                    trim(log, self.settings.log_bytes)


def trim(log: Path, limit_bytes: int) -> None:
    """Cut a log beyond the limit to its newer half."""
    if log.stat().st_size > limit_bytes:
        with open(log, "r+b") as file:
            file.seek(-limit_bytes // 2, os.SEEK_END)
            rest = file.read(limit_bytes // 2)
            file.truncate(0)
            file.seek(0)
            file.write(rest)
