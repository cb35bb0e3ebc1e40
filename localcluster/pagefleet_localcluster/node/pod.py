"""One pod on this node, from its binding to its end."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from pagefleet_localcluster.client import CONFIG_MAPS, PODS, SECRETS, SERVICES, UNREACHABLE, ApiError, Client
from pagefleet_localcluster.node.container import ContainerContext, ContainerRunner
from pagefleet_localcluster.node.container_state import restored
from pagefleet_localcluster.node.environment import ConfigProblem, PodFacts, service_variables
from pagefleet_localcluster.node.launch import ContainerFolder, build_command
from pagefleet_localcluster.node.pod_status import PodView, pod_status
from pagefleet_localcluster.node.process import Command
from pagefleet_localcluster.node.settings import NodeSettings
from pagefleet_localcluster.node.volumes import (
    VolumeProblem,
    config_references,
    decode_config,
    prepare_volumes,
    remove_volumes,
)
from pagefleet_localcluster.objects import Object, is_deleted, name_of, version_of

logger = logging.getLogger(__name__)

VOLUME_RETRY_SECONDS = 1.0
MAX_STATUS_BACKOFF_SECONDS = 5.0
MAX_STATUS_TRIES = 5
HOST_ADDRESS = "127.0.0.1"


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
        self.pod = pod
        self.address = address
        self.has_ended = False
        """Whether its processes are gone and only its object is left to delete."""
        self._services = services
        self._gpu_ids = gpu_ids
        self._folder = services.settings.directory / "pods" / pod["metadata"]["uid"]
        self._facts = PodFacts(pod, address, HOST_ADDRESS, services.allocatable, {}, {})
        self._volumes: dict[str, Path] = {}
        self._deleting = asyncio.Event()
        self._dirty = asyncio.Event()
        self._change = asyncio.Event()
        policy = pod["spec"].get("restartPolicy", "Always")
        init = pod["spec"].get("initContainers") or ()
        self._sidecars = frozenset(c["name"] for c in init if c.get("restartPolicy") == "Always")

        def restarts_main(code: int) -> bool:
            return policy == "Always" or (policy == "OnFailure" and code != 0)

        def restarts_init(code: int) -> bool:
            return code != 0 and policy != "Never"

        self._init = [self._runner(c, (lambda _: True) if c["name"] in self._sidecars else restarts_init) for c in init]
        self._main = [self._runner(c, restarts_main) for c in pod["spec"]["containers"]]
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._set_up = False
        self._abandoned_grace_seconds: float | None = None
        self._phase = (pod.get("status") or {}).get("phase", "Pending")

    @property
    def runners(self) -> dict[str, ContainerRunner]:
        """Container name -> runner."""
        return {runner.state.name: runner for runner in [*self._init, *self._main]}

    def folder_of(self, container: str) -> ContainerFolder:
        """Where a container keeps its files."""
        return ContainerFolder(self._folder / "containers" / container)

    def update(self, pod: Object) -> None:
        """Take a newer version of the object: labels, deletion, a shorter grace period."""
        shorter = _grace_of(pod) < _grace_of(self.pod)
        pod["metadata"].pop("managedFields", None)
        self.pod = pod
        self._facts = replace(self._facts, pod=pod)
        if is_deleted(pod):
            if self._deleting.is_set() and shorter:
                for runner in self.runners.values():
                    asyncio.get_running_loop().call_later(_grace_of(pod), runner.kill)
            self._deleting.set()
        self._dirty.set()

    def abandon(self, grace_seconds: float) -> None:
        """The node stops: end the processes within this time and leave the object alone."""
        self._abandoned_grace_seconds = grace_seconds
        self._deleting.set()

    async def run(self) -> None:
        """Live, end, and delete the object when its deletion was asked for."""
        writer = asyncio.create_task(self._write_statuses())
        life = asyncio.create_task(self._live())
        deletion = asyncio.create_task(self._deleting.wait())
        try:
            await asyncio.wait({life, deletion}, return_when=asyncio.FIRST_COMPLETED)
            if life.done() and life.exception() is not None:
                logger.error("pod %s failed on this node", name_of(self.pod), exc_info=life.exception())
            await deletion
            abandoned = self._abandoned_grace_seconds
            await self._end(_grace_of(self.pod) if abandoned is None else min(abandoned, _grace_of(self.pod)))
            await _cancel(life, writer)
            self.has_ended = True
            if abandoned is None:
                await self._delete()
        finally:
            await _cancel(life, deletion, writer, *self._tasks.values())
            for runner in self.runners.values():
                if runner.process is not None:
                    runner.process.signal(signal.SIGKILL)
                    await runner.process.wait()
            remove_volumes(self._folder)

    async def _end(self, grace_seconds: float) -> None:
        """Stop all containers: the main ones together, then sidecars in reverse order, within the grace period."""
        loop = asyncio.get_running_loop()
        for runner in self.runners.values():
            runner.state.ready = False
        self._dirty.set()
        until = loop.time() + grace_seconds
        plain = [r for r in self._init if r.state.name not in self._sidecars]
        await asyncio.gather(*(self._stop(runner, grace_seconds) for runner in [*self._main, *plain]))
        await self._stop_sidecars(max(0.0, until - loop.time()))
        if self._phase not in ("Succeeded", "Failed"):
            failed = any(runner.state.exit_code for runner in self._main)
            self._phase = "Failed" if failed else "Succeeded"
        self._dirty.set()

    async def _stop(self, runner: ContainerRunner, grace_seconds: float) -> None:
        await runner.stop(grace_seconds)
        if (task := self._tasks.get(runner.state.name)) is not None:
            await asyncio.gather(task, return_exceptions=True)

    async def _stop_sidecars(self, grace_seconds: float) -> None:
        until = asyncio.get_running_loop().time() + grace_seconds
        for runner in reversed([r for r in self._init if r.state.name in self._sidecars]):
            await self._stop(runner, max(0.0, until - asyncio.get_running_loop().time()))

    async def _live(self) -> None:
        """Set up, run init containers in order, then the others until all have ended for good."""
        if self._phase in ("Succeeded", "Failed"):
            return
        await self._prepare()
        self._dirty.set()
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
        await self._stop_sidecars(_grace_of(self.pod))
        self._phase = phase
        self._changed()

    def _start(self, runner: ContainerRunner) -> asyncio.Task[None]:
        task = self._tasks[runner.state.name] = asyncio.create_task(runner.run())
        return task

    async def _prepare(self) -> None:
        """Fetch configuration and create volumes; try again while something is missing."""
        (self._folder / "volumes").mkdir(parents=True, exist_ok=True)
        (self._services.settings.shared_directory / "cache").mkdir(parents=True, exist_ok=True)
        while True:
            try:
                await self._fetch_config()
                shared = self._services.settings.shared_directory
                self._volumes = prepare_volumes(self._facts, self._folder / "volumes", shared, {})
            except (VolumeProblem, ConfigProblem, OSError, *UNREACHABLE, ApiError) as error:
                self._say("Warning", "FailedMount", str(error), "")
                await asyncio.sleep(VOLUME_RETRY_SECONDS)
                continue
            self._set_up = True
            return

    async def _fetch_config(self) -> None:
        namespace = self.pod["metadata"]["namespace"]
        resources = {"ConfigMap": CONFIG_MAPS, "Secret": SECRETS}
        config: dict[tuple[str, str], dict[str, str] | None] = {}
        for kind, name in sorted(config_references(self.pod)):
            try:
                obj = await self._services.client.get(resources[kind], name, namespace)
            except ApiError as error:
                if error.code != 404:
                    raise
                config[kind, name] = None
            else:
                config[kind, name] = decode_config(kind, obj)
        services: dict[str, str] = {}
        if self.pod["spec"].get("enableServiceLinks", True):
            services = service_variables((await self._services.client.list(SERVICES, namespace))["items"])
        self._facts = replace(self._facts, config=config, services=services)

    def _runner(self, container: Object, restarts: Callable[[int], bool]) -> ContainerRunner:
        name = container["name"]
        folder = self.folder_of(name)
        section = "initContainers" if container in (self.pod["spec"].get("initContainers") or ()) else "containers"

        async def build() -> Command:
            def attempt() -> Command:
                return build_command(
                    container,
                    self._facts,
                    settings=self._services.settings,
                    folder=folder,
                    volumes=self._volumes,
                    gpu_ids=self._gpu_ids.get(name, ()),
                )

            try:
                return attempt()
            except ConfigProblem as problem:  # what is missing may have been created since
                try:
                    await self._fetch_config()
                except (ApiError, *UNREACHABLE):
                    raise problem from None
                return attempt()

        def say(type: str, reason: str, message: str) -> None:
            self._say(type, reason, message, f"spec.{section}{{{name}}}")

        context = ContainerContext(
            self.pod, self.address, self._services.settings, folder, self._services.http, build, say, self._changed
        )
        statuses = [
            status
            for key in ("initContainerStatuses", "containerStatuses")
            for status in (self.pod.get("status") or {}).get(key) or ()
        ]
        state = restored(name, container["image"], statuses)
        if not state.container_id and not self.pod["spec"].get("initContainers"):
            state.wait("ContainerCreating")
        return ContainerRunner(container, context, state, restarts)

    def _say(self, type: str, reason: str, message: str, field: str) -> None:
        self._services.say(self.pod, type, reason, message, field)

    def _changed(self) -> None:
        self._dirty.set()
        self._change.set()

    async def _write_statuses(self) -> None:
        backoff = 0.05
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            try:
                await self._write_status()
                backoff = 0.05
            except (ApiError, *UNREACHABLE) as error:
                if isinstance(error, ApiError) and error.code == 404:
                    continue
                logger.debug("status of pod %s: %s", name_of(self.pod), error)
                self._dirty.set()
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_STATUS_BACKOFF_SECONDS)

    async def _write_status(self) -> None:
        view = PodView(
            phase=self._visible_phase(),
            address=self.address if self._set_up else "",
            host_address=HOST_ADDRESS,
            init=[runner.state for runner in self._init],
            sidecars=self._sidecars,
            containers=[runner.state for runner in self._main],
            terminating=self._deleting.is_set(),
        )
        for _ in range(MAX_STATUS_TRIES):
            status = pod_status(self.pod, view, time.time())
            if status == self.pod.get("status"):
                return
            try:
                fresh = await self._services.client.replace(PODS, {**self.pod, "status": status}, "status")
            except ApiError as error:
                if error.code != 409:
                    raise
                namespace = self.pod["metadata"]["namespace"]
                fresh = await self._services.client.get(PODS, name_of(self.pod), namespace)
                if fresh["metadata"]["uid"] != self.pod["metadata"]["uid"]:
                    return
                self._take(fresh)
            else:
                self._take(fresh)
                return

    def _visible_phase(self) -> str:
        """A pod is Pending until each of its containers has run once."""
        fresh = any("waiting" in r.state.state and not r.state.last_state for r in self._main)
        return "Pending" if fresh and self._phase == "Running" else self._phase

    def _take(self, pod: Object) -> None:
        """Go on from a newer version; an older one (an answer overtaken by the watch) is ignored."""
        if version_of(pod) > version_of(self.pod):
            self.update(pod)

    async def _delete(self) -> None:
        """Write the final status and confirm the end to the API server, until it takes it or the pod is gone."""
        backoff = 0.05
        while True:
            try:
                await self._write_status()
                await self._services.client.delete(
                    PODS,
                    name_of(self.pod),
                    self.pod["metadata"]["namespace"],
                    uid=self.pod["metadata"]["uid"],
                    grace_seconds=0,
                )
                return
            except ApiError as error:
                if error.code in (404, 409):
                    return
                logger.warning("deleting pod %s: %s", name_of(self.pod), error)
            except UNREACHABLE as error:
                logger.debug("deleting pod %s: %s", name_of(self.pod), error)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_STATUS_BACKOFF_SECONDS)


def _grace_of(pod: Object) -> float:
    metadata, spec = pod["metadata"], pod["spec"]
    return float(metadata.get("deletionGracePeriodSeconds", spec.get("terminationGracePeriodSeconds", 30)))


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
