"""Runs one container: starts its process, probes it, restarts it with back-off, stops it in order."""

import asyncio
import logging
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from pagefleet_localcluster.node.container_state import ContainerState
from pagefleet_localcluster.node.environment import ConfigProblem
from pagefleet_localcluster.node.launch import ContainerFolder, StartProblem
from pagefleet_localcluster.node.probes import ProbeTarget, attempt, watch_probe
from pagefleet_localcluster.node.process import Command, Process
from pagefleet_localcluster.node.settings import NodeSettings
from pagefleet_localcluster.objects import Object

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 4096
LOG_TAIL_BYTES = 2048
MINIMUM_GRACE_SECONDS = 2.0
"""What SIGTERM gets even when preStop took the whole grace period, as in Kubernetes."""
CONFIG_RETRY_SECONDS = 1.0
RESET_BACKOFF_FACTOR = 2.0


@dataclass(frozen=True)
class ContainerContext:
    """What a container gets from its pod and node."""

    pod: Object
    address: str
    settings: NodeSettings
    folder: ContainerFolder
    http: aiohttp.ClientSession
    build: Callable[[], Awaitable[Command]]
    """The command, from the newest configuration. Raises ConfigProblem, StartProblem."""
    say: Callable[[str, str, str], None]
    """Records an event: (type, reason, message)."""
    changed: Callable[[], None]
    """Called after every change of the state."""


class ContainerRunner:
    """One container of a pod, over all of its restarts."""

    def __init__(
        self, container: Object, context: ContainerContext, state: ContainerState, restarts: Callable[[int], bool]
    ) -> None:
        """`restarts(exit code)`: whether it is started again."""
        self.container = container
        self.state = state
        self.process: Process | None = None
        self._context = context
        self._restarts = restarts
        self._stopping = asyncio.Event()
        self._command: Command | None = None
        self._backoff_seconds = 0.0

    @property
    def log_number(self) -> int:
        """The number of the current run's log file."""
        return self.state.restart_count

    async def run(self) -> None:
        """Run until it has ended for good or was stopped."""
        again = bool(self.state.container_id)
        self._context.folder.work.mkdir(parents=True, exist_ok=True)
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._run_once(restarted=again)
            if code is None or self._stopping.is_set() or not self._restarts(code):
                return
            again = True
            if time.monotonic() - began > RESET_BACKOFF_FACTOR * self._context.settings.backoff_max_seconds:
                self._backoff_seconds = 0.0
            await self._back_off()

    async def stop(self, grace_seconds: float) -> None:
        """End it for good: preStop, SIGTERM, after the grace period SIGKILL."""
        self._stopping.set()
        if self.process is not None:
            self._context.say("Normal", "Killing", f"Stopping container {self.state.name}")
            await self._end(self.process, grace_seconds)

    def kill(self) -> None:
        """SIGKILL now."""
        self._stopping.set()
        if self.process is not None:
            self.process.signal(signal.SIGKILL)

    def command_beside(self, argv: list[str]) -> Command | None:
        """A command in the container's environment; None while the container does not run."""
        if self._command is None or self.process is None:
            return None
        return Command("/usr/bin/env", ["env", *argv], self._command.environment, self._command.folder)

    async def run_beside(self, argv: list[str], timeout_seconds: float) -> tuple[int, str]:
        """Run a command in the container's environment: (exit code, output). Raises TimeoutError."""
        command = self.command_beside(argv)
        if command is None:
            return 1, "the container is not running"
        with tempfile.TemporaryFile(dir=self._context.folder.path) as output:
            process = Process(command, output=output.fileno())
            try:
                async with asyncio.timeout(timeout_seconds):
                    code = await process.wait()
            finally:
                process.signal(signal.SIGKILL)
            output.seek(0)
            return code, output.read(MESSAGE_BYTES).decode(errors="replace").strip()

    async def _run_once(self, *, restarted: bool) -> int | None:
        """Start, probe, wait for the end. None when it was stopped before it could start."""
        context, state = self._context, self.state
        while True:
            try:
                self._command = await context.build()
                break
            except ConfigProblem as error:
                if state.state.get("waiting", {}).get("message") != str(error):
                    state.wait("CreateContainerConfigError", str(error))
                    context.say("Warning", "Failed", f"Error: {error}")
                    context.changed()
                if await self._stopped_within(CONFIG_RETRY_SECONDS):
                    return None
            except StartProblem as error:
                return self._fail_to_start(error, restarted=restarted)
        if self._stopping.is_set():
            return None
        number = state.restart_count + restarted
        context.folder.termination_log.write_bytes(b"")
        context.folder.log(number - 2).unlink(missing_ok=True)
        image = self.container["image"]
        context.say("Normal", "Pulled", f'Container image "{image}" already present on machine')
        try:
            process = self.process = _start(self._command, context.folder, number)
        except (OSError, ValueError) as error:  # out of processes, an argument that no program can get ...
            return self._fail_to_start(error, restarted=restarted)
        context.say("Normal", "Created", f"Created container: {state.name}")
        state.run(self._new_id(), time.time(), restarted=restarted)
        context.say("Normal", "Started", f"Started container {state.name}")
        context.changed()
        probes = asyncio.create_task(self._supervise(process))
        try:
            code = await process.wait()
        finally:
            process.signal(signal.SIGKILL)
            probes.cancel()
            [outcome] = await asyncio.gather(probes, return_exceptions=True)
            if isinstance(outcome, Exception):
                logger.error("probes of container %s failed", state.name, exc_info=outcome)
        self.process = None
        state.end(code, "Completed" if code == 0 else "Error", self._last_words(code), time.time())
        context.changed()
        return code

    def _fail_to_start(self, error: Exception, *, restarted: bool) -> int:
        context, state = self._context, self.state
        state.run(self._new_id(), time.time(), restarted=restarted)
        state.end(128, "StartError", str(error), time.time())
        context.say("Warning", "Failed", f"Error: {error}")
        context.changed()
        return 128

    async def _supervise(self, process: Process) -> None:
        """postStart, then the startup probe, then liveness and readiness until the process ends."""
        container, context, state = self.container, self._context, self.state
        target = ProbeTarget(context.address, container, context.http, self.run_beside)
        if hook := (container.get("lifecycle") or {}).get("postStart"):
            problem = await self._run_hook(hook, target, 300.0)
            if problem:
                context.say("Warning", "FailedPostStartHook", f"PostStartHook failed: {problem}")
                await self._end(process, self._grace_seconds({}))
                return
        if (startup := container.get("startupProbe")) and not await self._hold(process, startup, target, "Startup"):
            return
        state.started = True
        state.ready = not container.get("readinessProbe")
        context.changed()
        async with asyncio.TaskGroup() as group:
            if readiness := container.get("readinessProbe"):
                group.create_task(self._follow_readiness(readiness, target))
            if liveness := container.get("livenessProbe"):
                group.create_task(self._hold(process, liveness, target, "Liveness"))

    async def _hold(self, process: Process, probe: Object, target: ProbeTarget, kind: str) -> bool:
        """A startup (ends by success) or liveness probe: ended at its failure threshold. True for success."""
        passed = True

        def on_failure(message: str, reached: bool) -> bool:
            nonlocal passed
            self._context.say("Warning", "Unhealthy", f"{kind} probe failed: {message}")
            passed = not reached
            return reached

        await watch_probe(probe, target, on_success=lambda: kind == "Startup", on_failure=on_failure)
        if not passed:
            message = f"Container {self.state.name} failed {kind.lower()} probe, will be restarted"
            self._context.say("Normal", "Killing", message)
            await self._end(process, self._grace_seconds(probe))
        return passed

    async def _follow_readiness(self, probe: Object, target: ProbeTarget) -> None:
        def set_ready(ready: bool) -> bool:
            if self.state.ready != ready and not self._stopping.is_set():
                self.state.ready = ready
                self._context.changed()
            return False

        def on_failure(message: str, reached: bool) -> bool:
            self._context.say("Warning", "Unhealthy", f"Readiness probe failed: {message}")
            return set_ready(False) if reached else False

        await watch_probe(probe, target, on_success=lambda: set_ready(True), on_failure=on_failure)

    async def _end(self, process: Process, grace_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        killer = loop.call_later(grace_seconds + MINIMUM_GRACE_SECONDS, process.signal, signal.SIGKILL)
        try:
            hook = (self.container.get("lifecycle") or {}).get("preStop")
            if hook and grace_seconds > 0:
                began = loop.time()
                target = ProbeTarget(self._context.address, self.container, self._context.http, self.run_beside)
                running = asyncio.create_task(self._run_hook(hook, target, grace_seconds))
                ended = asyncio.create_task(process.wait())
                await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
                if running.done() and (problem := running.result()):
                    self._context.say("Warning", "FailedPreStopHook", f"PreStopHook failed: {problem}")
                running.cancel()
                ended.cancel()
                grace_seconds = max(MINIMUM_GRACE_SECONDS, grace_seconds - (loop.time() - began))
            killer.cancel()
            process.signal(signal.SIGTERM if grace_seconds > 0 else signal.SIGKILL)
            killer = loop.call_later(grace_seconds, process.signal, signal.SIGKILL)
            await process.wait()
        finally:
            killer.cancel()

    async def _run_hook(self, hook: Object, target: ProbeTarget, timeout: float) -> str:
        """Run a lifecycle hook; returns what went wrong."""
        if (pause := hook.get("sleep")) is not None:
            await asyncio.sleep(min(float(pause["seconds"]), timeout))
            return ""
        outcome = await attempt({**hook, "timeoutSeconds": timeout}, target)
        return "" if outcome.ok else outcome.message or "the command failed"

    async def _back_off(self) -> None:
        settings, metadata = self._context.settings, self._context.pod["metadata"]
        delay, name = self._backoff_seconds, self.state.name
        self._backoff_seconds = min(max(2 * delay, settings.backoff_min_seconds), settings.backoff_max_seconds)
        if not delay:
            return
        pod = f"{metadata['name']}_{metadata['namespace']}({metadata['uid']})"
        self.state.wait("CrashLoopBackOff", f"back-off {delay:g}s restarting failed container={name} pod={pod}")
        self._context.say("Warning", "BackOff", f"Back-off restarting failed container {name} in pod {pod}")
        self._context.changed()
        await self._stopped_within(delay)

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True

    def _grace_seconds(self, probe: Object) -> float:
        return float(
            probe.get(
                "terminationGracePeriodSeconds", self._context.pod["spec"].get("terminationGracePeriodSeconds", 30)
            )
        )

    def _last_words(self, code: int) -> str:
        message = _tail(self._context.folder.termination_log, MESSAGE_BYTES)
        if not message and code and self.container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            message = _tail(self._context.folder.log(self.log_number), LOG_TAIL_BYTES)
        return message

    @staticmethod
    def _new_id() -> str:
        return f"process://{uuid.uuid4().hex}"


def _start(command: Command, folder: ContainerFolder, number: int) -> Process:
    with open(folder.log(number), "ab") as log:
        return Process(command, output=log.fileno(), pid_file=folder.pid_file)


def _tail(path: os.PathLike[str], limit: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            return file.read(limit).decode(errors="replace")
    except OSError:
        return ""
