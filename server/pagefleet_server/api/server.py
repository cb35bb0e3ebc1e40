"""The life of the API process: listen, load, serve, drain, end; one exit code."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from pagefleet_server.api.api_keys import ApiKeys, KeyFileError
from pagefleet_server.api.app import make_app
from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.exit_code import ExitCode
from pagefleet_server.api.garbage import spare_the_loop
from pagefleet_server.api.generation_defaults import load_generation_defaults
from pagefleet_server.api.http_faults import answer_faults_as_errors
from pagefleet_server.api.service import DrainExpiredError, Loaded, Service
from pagefleet_server.api.text_model import TextModel, load_text_model
from pagefleet_server.api.tracing import TracingUnavailableError, make_tracing
from pagefleet_server.client.engine_client import EngineClient
from pagefleet_server.client.errors import EngineDeadError
from pagefleet_server.log import HTTP_LOGGER, LOGGER, tell_in_one_line
from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.download import DownloadError, make_download
from pagefleet_server.models.hub import hub_model
from pagefleet_server.settings import ServerSettings
from pagefleet_server.stop_signals import StopSignals
from pagefleet_server.tokenizer import read_template

TEXT_THREADS = 2
LISTEN_ADVICE = "choose a free port and an address of this machine, such as 127.0.0.1, 0.0.0.0 or ::"
LAST_WORDS_SECONDS = 2.0
"""Open answers get so long to write their last event before the connections are cut."""
LINGER_SECONDS = 2.0
"""The rest of a body that nobody reads is taken in for so long, so that the client sees the answer and no reset."""
STOP_SECONDS = 2.0
"""For the engine to end by itself; then it is killed."""


class Server:
    """One server process. run() must be called in the main thread's event loop, within `signals.handled()`. The
    `client` may have been started before."""

    def __init__(
        self,
        settings: ServerSettings,
        *,
        client: EngineClient,
        signals: StopSignals,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._client = client
        self._signals = signals
        self._clock = clock
        self._model_refused = False  # and told

    async def run(self) -> ExitCode:
        """Serve until a signal or the engine's end; leaves no process behind."""
        model, http = self._settings.engine.model, self._settings.http
        try:
            keys = http.api_key_file and ApiKeys(Path(http.api_key_file), clock=self._clock, report=LOGGER.info)
        except KeyFileError as error:
            LOGGER.error("--api-key-file: %s", error)
            return ExitCode.USAGE
        name = model.served_model_name or name_model(model.model)
        try:
            tracing = http.otlp_endpoint and make_tracing(
                http.otlp_endpoint, model_name=name, version=version("pagefleet"), clock=self._clock
            )
        except TracingUnavailableError as error:
            LOGGER.error("--otlp-endpoint: %s", error)
            return ExitCode.USAGE
        client = self._client
        service = Service(
            self._settings,
            model_name=name,
            client=client,
            clock=self._clock,
            keys=keys or None,
            tracing=tracing or None,
        )
        client.observe_steps(service.tracker.on_step)
        client.observe_outputs(service.tracker.on_output)
        answer_faults_as_errors()
        HTTP_LOGGER.addFilter(tell_in_one_line(HttpProcessingError, RequestPayloadError))
        runner = web.AppRunner(
            make_app(service),
            access_log=None,
            logger=HTTP_LOGGER,
            handler_cancellation=True,
            auto_decompress=False,  # a kilobyte may unpack to a megabyte, in one turn of the loop
            lingering_time=LINGER_SECONDS,
            keepalive_timeout=http.keep_alive_seconds,
            shutdown_timeout=LAST_WORDS_SECONDS,
        )
        try:
            if not await self._listen(runner):
                return ExitCode.FAILED
            with ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text") as pool:
                return await self._live(service, pool)
        finally:
            await client.stop(timeout_seconds=STOP_SECONDS if client.ready else 0.0)  # a starting one cannot listen
            await runner.cleanup()
            if service.loaded is not None:
                await service.loaded.text.close()
            if service.tracing is not None:
                await asyncio.to_thread(service.tracing.close)

    async def _listen(self, runner: web.AppRunner) -> bool:
        http = self._settings.http
        await runner.setup()
        try:
            await web.TCPSite(runner, http.host, http.port, backlog=1024).start()
        except OSError as error:
            reason = error.strerror or error
            LOGGER.error("cannot listen on --host %s --port %d: %s; %s", http.host, http.port, reason, LISTEN_ADVICE)
            return False
        for host, port, *_ in runner.addresses:
            LOGGER.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        return True

    async def _live(self, service: Service, pool: ThreadPoolExecutor) -> ExitCode:
        """Everything that can end the server, each as a task that gives the exit code; the first one decides."""
        endings = {
            asyncio.create_task(self._load(service, pool), name="load"),
            asyncio.create_task(self._watch_engine(service), name="engine"),
            asyncio.create_task(self._drain(service), name="drain"),
            asyncio.create_task(self._terminate(service), name="terminate"),
            asyncio.create_task(self._interrupt(), name="interrupt"),
        }
        try:
            while True:
                done, endings = await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
                codes = [code for task in done if (code := task.result()) is not None]
                if codes:
                    return codes[0]
        finally:
            for task in endings:
                task.cancel()
            await asyncio.gather(*endings, return_exceptions=True)

    async def _load(self, service: Service, pool: ThreadPoolExecutor) -> ExitCode | None:
        """Text side and engine at the same time. None: both are there."""
        begun = self._clock()
        LOGGER.info("loading %r as %r", self._settings.engine.model.model, service.model_name)
        loop = asyncio.get_running_loop()
        try:
            fetched = await self._fetch(service)
            if service.client.process_id is None:
                await service.client.start(model_path=None if fetched is None else str(fetched))
            model = fetched or Path(self._settings.engine.model.model)
            text: TextModel = await loop.run_in_executor(pool, self._load_text, model, pool)
            defaults = load_generation_defaults(model) if self._settings.engine.model.generation_config else {}
        except (ModelError, BadRequestError) as error:
            return self._refuse_model(str(error))
        except DownloadError as error:
            LOGGER.error("the model cannot be downloaded: %s", error)
            return ExitCode.FAILED
        try:
            ready = await service.client.wait_ready()
        except EngineDeadError:
            return None  # _watch_engine tells
        spare_the_loop()
        service.loaded = Loaded(ready, text, defaults)
        if defaults:
            LOGGER.info("requests that do not say get the model's own %s", defaults)
        LOGGER.info(
            "ready after %.1f s: context %d tokens, %d blocks of %d tokens, attention %s",
            self._clock() - begun,
            ready.max_model_len,
            ready.num_blocks,
            ready.block_size,
            ready.attention_backend,
        )
        return None

    def _load_text(self, model: Path, pool: ThreadPoolExecutor) -> TextModel:
        """Blocking. Raises ModelError, BadRequestError."""
        given = self._settings.engine.model.chat_template
        return load_text_model(model, pool, template=None if given is None else read_template(given))

    async def _fetch(self, service: Service) -> Path | None:
        """Where a model of a hub lies after its download; None for one of this machine. Raises ModelError or
        DownloadError."""
        settings = self._settings.engine.model
        wanted = hub_model(settings.model)
        if wanted is None:
            return None
        download = make_download(wanted, settings.download_dir, os.environ)
        service.download = download.progress
        return await download.run()

    async def _watch_engine(self, service: Service) -> ExitCode:
        error = await service.client.on_death
        service.tracker.on_death()
        if error.return_code == ExitCode.BAD_MODEL:
            return self._refuse_model(error.reason)
        if self._signals.interrupted.is_set():
            return ExitCode.INTERRUPTED  # ctrl-C reaches both processes; this one may have been too young to ignore it
        LOGGER.error("the engine died: %s", error.reason)
        await self._wait_for_idle(service, LAST_WORDS_SECONDS)
        return ExitCode.FAILED

    def _refuse_model(self, reason: str) -> ExitCode:
        """Told once: both processes read the model, and find the same fault."""
        if not self._model_refused:
            LOGGER.error("the model cannot be served: %s", reason)
        self._model_refused = True
        return ExitCode.BAD_MODEL

    async def _drain(self, service: Service) -> ExitCode | None:
        """None: there are no open requests because the engine died."""
        await service.drain_begun.wait()
        if service.loaded is None:
            LOGGER.info("told to end before the model was loaded")
            return ExitCode.OK
        http = self._settings.http
        LOGGER.info(
            "draining: new requests are served for %g s, then open ones (%d now) have %g s",
            http.drain_delay_seconds,
            service.num_open,
            http.drain_timeout_seconds,
        )
        await asyncio.sleep(service.drain.seconds_to_refusal)
        if not await self._wait_for_idle(service, service.drain.seconds_to_expiry):
            LOGGER.warning("drain timeout: %d open requests are ended", service.num_open)
            service.end_streams(
                DrainExpiredError(
                    f"this replica is shutting down and the drain timeout of {http.drain_timeout_seconds:g} s is over"
                )
            )
            await self._wait_for_idle(service, LAST_WORDS_SECONDS)
        if service.client.dead is not None:
            return None  # _watch_engine tells
        LOGGER.info("drained")
        return ExitCode.OK

    async def _terminate(self, service: Service) -> None:
        """_drain says how it ends."""
        await self._signals.terminated.wait()
        service.begin_drain()

    async def _interrupt(self) -> ExitCode:
        await self._signals.interrupted.wait()
        LOGGER.info("interrupted")
        return ExitCode.INTERRUPTED

    async def _wait_for_idle(self, service: Service, limit_seconds: float) -> bool:
        """Whether all open requests ended in time."""
        try:
            async with asyncio.timeout(limit_seconds):
                await service.idle.wait()
        except TimeoutError:
            return False
        return True


def name_model(path: str) -> str:
    """The last part of the path or of the hub's name, without the suffix of a file and without the revision."""
    with contextlib.suppress(ModelError):  # told when it is loaded
        found = hub_model(path)
        if found is not None and found.file is None:
            return found.repo.partition("/")[2]
    last = Path(path)
    return (last.stem if last.suffix == ".gguf" else last.name) or path
