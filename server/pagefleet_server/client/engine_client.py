"""Starts the engine process, sends it requests, hands out its tokens, and knows when it is dead."""

import asyncio
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from pagefleet_server.client.engine_process import EngineProcess
from pagefleet_server.client.errors import (
    EngineDeadError,
    EngineNotReadyError,
    RequestFailedError,
    RequestRefusedError,
)
from pagefleet_server.client.request_stream import RequestStream
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.engine.exit_code import ExitCode, describe_exit
from pagefleet_server.frames import HEADER_BYTES, MAX_FRAME_BYTES, FrameError, encode_frame
from pagefleet_server.settings import EngineSettings
from pagefleet_server.wire import (
    AbortRequests,
    AddRequests,
    Failed,
    FromEngine,
    Gauges,
    Ready,
    RequestOutput,
    ResetPrefixCache,
    Starting,
    StepDone,
    Stop,
    ToEngine,
    write_samplings,
)

ENGINE_COMMAND = (sys.executable, "-P", "-m", "pagefleet_server.engine")
DELIVERED_AT_ONCE = 16
"""Outputs of a step between two turns of the event loop; the tasks that they wake take some milliseconds."""
REAP_SECONDS = 0.5
"""After the socket closed, so long is waited for the exit code before the death is told without one."""


class EngineClient:
    """One engine process, seen from the API process's event loop. Every method must be called in that loop.

    start() once, wait_ready(), then submit() as often as you like, stop() at the end. Nothing here blocks:
    sending goes to the transport's buffer, whose size the caller bounds by refusing requests on `num_waiting`.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._command = tuple(command)
        self._clock = clock
        self._process: EngineProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._streams: dict[str, RequestStream] = {}
        self._step_observers: list[Callable[[StepDone], None]] = []
        self._output_observers: list[Callable[[RequestOutput, float], None]] = []
        self._ids = itertools.count()
        self._num_sent = 0
        self._failed_reason: str | None = None
        self._stopping = False
        self._changed = asyncio.Event()  # ready or dead
        self.ready: Ready | None = None
        """What the engine said when it was warm; None before."""
        self.starting: Starting | None = None
        """The latest progress of the start-up."""
        self.loading: Starting | None = None
        """The latest that told how much of the weights is loaded."""
        self.gauges: Gauges | None = None
        """The latest state; None before the first message with one."""
        self.dead: EngineDeadError | None = None
        """Why the engine is gone; None while it lives."""
        self.last_message_time: float | None = None
        """Clock time of the last message of any kind."""
        self.on_death: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
        """Resolved (with a result, never an exception) when the engine ended unasked; stays pending after stop()."""

    async def start(self, *, model_path: str | None = None) -> None:
        """Start the process and return at once; wait_ready() follows its start-up. Call it from the main thread: the
        engine asks the kernel to be killed when the thread that started it ends. `model_path`: where a model of a hub
        lies now."""
        if self._process is not None:
            raise RuntimeError("start() was already called; make a new EngineClient")
        settings = self._settings
        if model_path is not None:
            settings = replace(settings, model=replace(settings.model, model=model_path))
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await EngineProcess.spawn(
                (
                    *self._command,
                    f"--fd={theirs.fileno()}",
                    f"--parent-pid={os.getpid()}",
                    f"--settings={msgspec.json.encode(settings).decode()}",
                ),
                inherit_fd=theirs.fileno(),
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self.last_message_time = self._clock()
        self._receiver = asyncio.create_task(self._receive(reader), name="engine-receiver")

    async def wait_ready(self) -> Ready:
        """Wait for the warm engine. Raises EngineDeadError with the reason when the start-up failed."""
        while self.ready is None:
            if self.dead is not None:
                raise self.dead
            self._changed.clear()
            await self._changed.wait()
        return self.ready

    @property
    def process_id(self) -> int | None:
        """Of the engine; None before start()."""
        return None if self._process is None else self._process.pid

    @property
    def last_message_age_seconds(self) -> float:
        """Time since anything came. Above about 1.5 s a step is long; with work and far above, the engine hangs."""
        return 0.0 if self.last_message_time is None else max(0.0, self._clock() - self.last_message_time)

    @property
    def num_unread(self) -> int:
        """Requests sent that the engine had not read when it last spoke."""
        return self._num_sent - (0 if self.gauges is None else self.gauges.num_added)

    @property
    def num_waiting(self) -> int:
        """Accepted requests of which no token has been scheduled: unread ones plus the engine's own queue.
        The one counter for admission, for the metric and for 503."""
        return self.num_unread + (0 if self.gauges is None else self.gauges.num_waiting)

    @property
    def num_open(self) -> int:
        """Streams that have not ended."""
        return len(self._streams)

    @property
    def has_work(self) -> bool:
        """True while an answer is owed: then silence means a hang."""
        return bool(self._streams) or self.num_waiting > 0

    def observe_steps(self, observer: Callable[[StepDone], None]) -> None:
        """Call it with every StepDone, in order, after `gauges` is updated and before the streams get their tokens."""
        self._step_observers.append(observer)

    def observe_outputs(self, observer: Callable[[RequestOutput, float], None]) -> None:
        """Call it with every output and its step's time, right before its stream gets it. What costs time for each
        output belongs here: hundreds of them do not come in one turn of the event loop."""
        self._output_observers.append(observer)

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> RequestStream:
        """Send a request; iterate the result for its tokens. tenant, cache_salt and priority as in wire.AddRequests.

        Raises EngineNotReadyError, EngineDeadError, RequestRefusedError (empty, too long, or an unknown token).
        """
        (stream,) = self.submit_group(
            prompt_token_ids, [sampling], tenant=tenant, cache_salt=cache_salt, priority=priority
        )
        return stream

    def submit_group(
        self,
        prompt_token_ids: Sequence[int],
        samplings: Sequence[SamplingParams],
        *,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> list[RequestStream]:
        """Send several requests with one prompt (n > 1): it is computed once and its blocks are shared. One stream for
        each sampling, in order. At most max_num_seqs of the settings. Raises as submit() does."""
        if self.dead is not None:
            raise self.dead
        if self.ready is None:
            raise EngineNotReadyError("the engine is still starting; try again when /readyz answers 200")
        limit = self._settings.scheduler.max_num_seqs
        if not 1 <= len(samplings) <= limit:
            raise RequestRefusedError(f"{len(samplings)} sequences of one prompt wanted; 1 to {limit} can run at once")
        check_request(prompt_token_ids, samplings, self.ready)
        request_ids = [f"r{next(self._ids)}" for _ in samplings]
        self._send(
            AddRequests(
                request_ids,
                list(prompt_token_ids),
                write_samplings(samplings),
                self._clock(),
                tenant=tenant,
                cache_salt=cache_salt,
                priority=priority,
            )
        )
        self._num_sent += len(request_ids)
        streams = [RequestStream(request_id, self.abort) for request_id in request_ids]
        self._streams.update(zip(request_ids, streams, strict=True))
        return streams

    def reset_prefix_cache(self) -> None:
        """No request submitted from now on finds blocks that are cached now. Raises as submit() does."""
        if self.dead is not None:
            raise self.dead
        if self.ready is None:
            raise EngineNotReadyError("the engine is still starting; its cache is empty")
        self._send(ResetPrefixCache())

    def abort(self, request_id: str) -> None:
        """End a request: its stream ends without another output, the engine frees its blocks within one step.
        An unknown or finished id does nothing."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        stream.close()
        if self.dead is None:
            self._send(AbortRequests([request_id]))

    async def stop(self, timeout_seconds: float = 5.0) -> int | None:
        """End the engine: ask, wait, then kill. Open streams get EngineDeadError. Gives its exit code, if started."""
        self._stopping = True
        if self._process is None:
            return None
        if self.dead is None:
            self._send(Stop())
        return_code = await self._process.stop(timeout_seconds)
        if self._receiver is not None:
            await self._receiver
        return return_code

    def _send(self, message: ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode_frame(message))

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        decoder = msgspec.msgpack.Decoder(FromEngine)
        reason: str | None = None
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")
                if length > MAX_FRAME_BYTES:
                    raise FrameError(f"the engine announced {length} bytes, at most {MAX_FRAME_BYTES} are allowed")
                message = decoder.decode(await reader.readexactly(length))
                self._handle(message)
                if isinstance(message, StepDone):
                    await self._deliver_all(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the process has ended; its exit code says how
        except (FrameError, msgspec.MsgspecError) as error:
            reason = f"the engine's messages cannot be read: {error}"
        finally:
            await self._bury(reason)

    def _handle(self, message: FromEngine) -> None:
        self.last_message_time = self._clock()
        match message:
            case StepDone():
                self.gauges = message.gauges
                for step_observer in self._step_observers:
                    step_observer(message)
            case Starting():
                self.starting = message
                self.loading = message if message.total_bytes else self.loading
            case Ready():
                self.ready = message
                self._changed.set()
            case Failed():
                self._failed_reason = message.reason

    async def _deliver_all(self, step: StepDone) -> None:
        """Some at a time: each wakes a task, and between them the loop must come to whoever else is ready."""
        for start in range(0, len(step.outputs), DELIVERED_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            for output in step.outputs[start : start + DELIVERED_AT_ONCE]:
                for observer in self._output_observers:
                    observer(output, step.time)
                self._deliver(output)

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return  # aborted a moment ago
        if output.finish_reason is not None:
            del self._streams[output.request_id]
        if output.error is None:
            stream.put(output)
        else:
            stream.fail((RequestRefusedError if output.is_refused else RequestFailedError)(output.error))

    async def _bury(self, reason: str | None) -> None:
        """The connection is over: learn why, tell everyone, leave no process."""
        assert self._process is not None and self._writer is not None
        if reason is not None:
            self._process.kill()
        return_code = await self._process.wait(REAP_SECONDS)
        self._writer.close()
        if return_code is None and not self._stopping:  # stop() grants its own time
            self._process.kill()
        if reason is None:
            ended = "its socket closed" if return_code is None else describe_exit(return_code)
            reason = f"the engine ended with {ended}"
            if return_code == ExitCode.BAD_MODEL and self._failed_reason is not None:
                reason = self._failed_reason
            elif self._failed_reason is not None:
                reason = f"{self._failed_reason} ({reason})"
        self.dead = EngineDeadError(reason, return_code=return_code)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(self.dead)
        self._changed.set()
        if not self._stopping and not self.on_death.done():
            self.on_death.set_result(self.dead)


def check_request(prompt_token_ids: Sequence[int], samplings: Sequence[SamplingParams], ready: Ready) -> None:
    """Raise RequestRefusedError when the engine could never run it."""
    num_prompt = len(prompt_token_ids)
    if num_prompt == 0:
        raise RequestRefusedError("the prompt has no tokens; at least 1 is needed")
    for sampling in samplings:
        if sampling.max_tokens < 1:
            raise RequestRefusedError(f"max_tokens is {sampling.max_tokens}; at least 1 is needed")
        if sampling.pooling != ready.pooling:
            raise RequestRefusedError(
                f"the model's results are {ready.pooling or 'texts'}, not {sampling.pooling or 'texts'}"
            )
        if num_prompt + sampling.num_drawn > ready.max_model_len:
            raise RequestRefusedError(
                f"{num_prompt} prompt tokens plus max_tokens {sampling.max_tokens} are"
                f" {num_prompt + sampling.max_tokens} tokens; the limit is {ready.max_model_len}"
            )
    low, high = min(prompt_token_ids), max(prompt_token_ids)
    if low < 0 or high >= ready.vocab_size:
        wrong = low if low < 0 else high
        raise RequestRefusedError(f"token id {wrong} is not in the vocabulary (0..{ready.vocab_size - 1})")
