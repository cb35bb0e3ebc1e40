"""One pod on this node, from its binding to its end."""

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from pagefleet_localcluster.client import Client
from pagefleet_localcluster.node.container import ContainerContext, ContainerRunner
from pagefleet_localcluster.node.container_state import restored
from pagefleet_localcluster.node.launch import ContainerFolder
from pagefleet_localcluster.node.pod_inputs import HOST_ADDRESS, PodInputs
from pagefleet_localcluster.node.pod_report import PodReport
from pagefleet_localcluster.node.pod_status import PodView
from pagefleet_localcluster.node.settings import NodeSettings
from pagefleet_localcluster.node.volumes import VolumeProblem, remove_volumes
from pagefleet_localcluster.objects import Object, is_deleted, name_of

logger = logging.getLogger(__name__)

VOLUME_RETRY_SECONDS = 1.0
FINISHED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class PodServices:
    """What the node lends to its pods."""

    settings: NodeSettings
    client: Client
    http: aiohttp.ClientSession
    say: Callable[[Object, str, str, str, str], None]
    """Records an event about a pod: (pod, type, reason, message, field path)."""
    allocatable: Mapping[str, str]


class PodWorker:
    """Runs one pod. `run()` returns when the pod has ended and its object is gone."""

    def __init__(
        self, pod: Object, services: PodServices, *, address: str, gpu_ids: Mapping[str, Sequence[int]]
    ) -> None:
        """`gpu_ids`: container name -> GPU slots."""
        self.address = address
        self.has_ended = False
        """Whether its processes are gone and only its object is left to delete."""
        self._services = services
        self._gpu_ids = gpu_ids
        self._is_over = False
        self._folder = services.settings.directory / "pods" / pod["metadata"]["uid"]
        self._report = PodReport(pod, services.client, self._view, self._taken)
        self._inputs = PodInputs(
            pod,
            services.client,
            services.settings,
            address=address,
            allocatable=services.allocatable,
            folder=self._folder / "volumes",
        )
        self._deleting = asyncio.Event()
        self._change = asyncio.Event()
        self._grace_seconds = _grace_of(pod)
        self._abandoned_grace_seconds: float | None = None
        self._set_up = False
        self._reason = ("", "")
        self._phase = (pod.get("status") or {}).get("phase", "Pending")
        self._tasks: dict[str, asyncio.Task[None]] = {}
        init = pod["spec"].get("initContainers") or ()
        self._sidecars = frozenset(c["name"] for c in init if c.get("restartPolicy") == "Always")
        policy = pod["spec"].get("restartPolicy", "Always")

        def restarts_main(code: int) -> bool:
            return policy == "Always" or (policy == "OnFailure" and code != 0)

        def restarts_init(code: int) -> bool:
            return code != 0 and policy != "Never"

        self._init = [self._runner(c, (lambda _: True) if c["name"] in self._sidecars else restarts_init) for c in init]
        self._main = [self._runner(c, restarts_main) for c in pod["spec"]["containers"]]

    @property
    def pod(self) -> Object:
        """The newest version of the object."""
        return self._report.pod

    @property
    def runners(self) -> dict[str, ContainerRunner]:
        """Container name -> runner."""
        return {runner.state.name: runner for runner in [*self._init, *self._main]}

    @property
    def gpu_slots(self) -> list[int]:
        """GPU slots that its processes may still use."""
        return [] if self._is_over else [slot for slots in self._gpu_ids.values() for slot in slots]

    def folder_of(self, container: str) -> ContainerFolder:
        """Where a container keeps its files."""
        return ContainerFolder(self._folder / "containers" / container)

    def update(self, pod: Object) -> None:
        """Take a newer version of the object: labels, deletion, a shorter grace period."""
        self._report.take(pod)

    def abandon(self, grace_seconds: float) -> None:
        """The node stops: end the processes within this time and leave the object alone."""
        self._abandoned_grace_seconds = grace_seconds
        self._deleting.set()

    async def run(self) -> None:
        """Live, end, and delete the object when its deletion was asked for."""
        if is_deleted(self.pod):
            self._deleting.set()
        writer = asyncio.create_task(self._report.run())
        life = asyncio.create_task(self._live_until_deadline())
        deletion = asyncio.create_task(self._deleting.wait())
        try:
            await asyncio.wait({life, deletion}, return_when=asyncio.FIRST_COMPLETED)
            if life.done() and life.exception() is not None:
                logger.error("pod %s failed on this node", name_of(self.pod), exc_info=life.exception())
            await deletion
            abandoned = self._abandoned_grace_seconds
            await self._end(self._grace_seconds if abandoned is None else min(abandoned, self._grace_seconds))
            await _cancel(life, writer)
            self.has_ended = True
            if abandoned is None:
                await self._report.delete()
        finally:
            await _cancel(life, deletion, writer, *self._tasks.values())
            for runner in self.runners.values():
                if runner.process is not None:
                    runner.process.signal(signal.SIGKILL)
                    await runner.process.wait()
            remove_volumes(self._folder)

    def _taken(self, pod: Object) -> None:
        self._inputs.update(pod)
        grace_seconds = _grace_of(pod)
        if is_deleted(pod):
            if self._deleting.is_set() and grace_seconds < self._grace_seconds:
                for runner in self.runners.values():
                    asyncio.get_running_loop().call_later(grace_seconds, runner.kill)
            self._deleting.set()
        self._grace_seconds = grace_seconds
        self._report.due.set()

    async def _end(self, grace_seconds: float) -> None:
        """Stop all containers: the main ones together, then sidecars in reverse order, within the grace period."""
        loop = asyncio.get_running_loop()
        for runner in self.runners.values():
            runner.state.ready = False
        self._changed()
        until = loop.time() + grace_seconds
        plain = [r for r in self._init if r.state.name not in self._sidecars]
        await asyncio.gather(*(self._stop(runner, grace_seconds) for runner in [*self._main, *plain]))
        await self._stop_sidecars(max(0.0, until - loop.time()))
        self._is_over = True  # before the API server hears of it: its scheduler then gives the GPUs to others
        if self._phase not in FINISHED and self._abandoned_grace_seconds is None:
            self._phase = "Failed" if any(runner.state.exit_code for runner in self._main) else "Succeeded"
        self._changed()

    async def _stop(self, runner: ContainerRunner, grace_seconds: float) -> None:
        await runner.stop(grace_seconds)
        if (task := self._tasks.get(runner.state.name)) is not None:
            await asyncio.gather(task, return_exceptions=True)

    async def _stop_sidecars(self, grace_seconds: float) -> None:
        until = asyncio.get_running_loop().time() + grace_seconds
        for runner in reversed([r for r in self._init if r.state.name in self._sidecars]):
            await self._stop(runner, max(0.0, until - asyncio.get_running_loop().time()))

    async def _live_until_deadline(self) -> None:
        try:
            async with asyncio.timeout(self.pod["spec"].get("activeDeadlineSeconds")):
                await self._live()
        except TimeoutError:
            self._reason = ("DeadlineExceeded", "Pod was active on the node longer than the specified deadline")
            self._say("Normal", "DeadlineExceeded", self._reason[1], "")
            self._phase = "Failed"
            await self._end(self._grace_seconds)

    async def _live(self) -> None:
        """Set up, run init containers in order, then the others until all have ended for good."""
        if self._phase in FINISHED:
            return
        await self._prepare()
        for runner in self._init:
            task = self._start(runner)
            if runner.state.name in self._sidecars:
                while not runner.state.started and not task.done():
                    self._change.clear()
                    await self._change.wait()
                continue
            await task
            if self._deleting.is_set():
                return
            if runner.state.exit_code != 0:
                await self._finish("Failed")
                return
        for runner in self._main:
            if runner.state.state.get("waiting", {}).get("reason") == "PodInitializing":
                runner.state.wait("ContainerCreating")
        self._phase = "Running"
        await asyncio.gather(*(self._start(runner) for runner in self._main))
        if not self._deleting.is_set():
            codes = [runner.state.exit_code for runner in self._main]
            await self._finish("Succeeded" if all(code == 0 for code in codes) else "Failed")

    async def _finish(self, phase: str) -> None:
        await self._stop_sidecars(self._grace_seconds)
        self._is_over = True
        self._phase = phase
        self._changed()

    def _start(self, runner: ContainerRunner) -> asyncio.Task[None]:
        task = self._tasks[runner.state.name] = asyncio.create_task(runner.run())
        return task

    async def _prepare(self) -> None:
        """Set up volumes and configuration; try again while something is missing."""
        self._changed()
        while True:
            try:
                await self._inputs.prepare()
            except VolumeProblem as problem:
                self._say("Warning", "FailedMount", str(problem), "")
                await asyncio.sleep(VOLUME_RETRY_SECONDS)
                continue
            self._set_up = True
            self._changed()
            return

    def _runner(self, container: Object, restarts: Callable[[int], bool]) -> ContainerRunner:
        name, folder = container["name"], self.folder_of(container["name"])
        init = self.pod["spec"].get("initContainers") or ()
        section = "initContainers" if container in init else "containers"
        context = ContainerContext(
            pod=self.pod,
            address=self.address,
            settings=self._services.settings,
            folder=folder,
            http=self._services.http,
            build=lambda: self._inputs.command(container, folder, self._gpu_ids.get(name, ())),
            say=lambda type, reason, message: self._say(type, reason, message, f"spec.{section}{{{name}}}"),
            changed=self._changed,
        )
        before = self.pod.get("status") or {}
        statuses = [*(before.get("initContainerStatuses") or ()), *(before.get("containerStatuses") or ())]
        state = restored(name, container["image"], statuses)
        if not state.container_id and not init:
            state.wait("ContainerCreating")
        return ContainerRunner(container, context, state, restarts)

    def _say(self, type: str, reason: str, message: str, field: str) -> None:
        self._services.say(self.pod, type, reason, message, field)

    def _changed(self) -> None:
        self._report.due.set()
        self._change.set()

    def _view(self) -> PodView:
        # A pod is Pending until each of its containers has run once.
        fresh = any("waiting" in r.state.state and not r.state.last_state for r in self._main)
        return PodView(
            phase="Pending" if fresh and self._phase == "Running" else self._phase,
            address=self.address if self._set_up else "",
            host_address=HOST_ADDRESS,
            init=[runner.state for runner in self._init],
            sidecars=self._sidecars,
            containers=[runner.state for runner in self._main],
            reason=self._reason[0],
            message=self._reason[1],
        )


def _grace_of(pod: Object) -> float:
    metadata, spec = pod["metadata"], pod["spec"]
    return float(metadata.get("deletionGracePeriodSeconds", spec.get("terminationGracePeriodSeconds", 30)))


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
