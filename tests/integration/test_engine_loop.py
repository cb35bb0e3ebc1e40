"""The step loop against a real socket: what it does when the API reads slowly, aborts, refuses to fit, or goes away."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from pagefleet_server.core.scheduler import Scheduler
from pagefleet_server.engine import channel as channel_module
from pagefleet_server.engine.channel import Channel, ChannelClosedError
from pagefleet_server.engine.loop import EngineLoop
from pagefleet_server.frames import FrameBuffer, encode_frame
from pagefleet_server.wire import AbortRequests, AddRequests, FromEngine, StepDone, Stop, ToEngine
from support.kv_memory_runner import expected_tokens
from support.memory_engine import MemoryEngineRunner, make_settings
from support.scheduling import make_limits, make_prompt, make_sampling

DEADLINE_SECONDS = 90.0


class NoGuard:
    """A stall guard that only tells what the loop does."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.rests = threading.Event()
        """The loop has taken steps, and waits."""

    def step_begins(self) -> None:
        self.num_steps += 1

    def idle(self) -> None:
        if self.num_steps:
            self.rests.set()


class Peer:
    """The API's end, in the test's thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = FrameBuffer()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    def send(self, message: ToEngine) -> None:
        self._socket.sendall(encode_frame(message))

    def read(self) -> StepDone:
        while not self._buffer.has_frame:
            data = self._socket.recv(4096)
            assert data, "the engine closed the socket"
            self._buffer.feed(data)
        (body,) = self._buffer.take(1)
        message = self._decoder.decode(body)
        assert isinstance(message, StepDone)
        return message


class Running:
    """A loop in a thread and what came of it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(DEADLINE_SECONDS)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        settings = make_settings(num_blocks=200)
        limits = make_limits(num_blocks=200, block_size=8, max_model_len=1600, max_num_batched_tokens=64)
        self.channel = Channel(theirs, clock=time.monotonic, unread_timeout_seconds=DEADLINE_SECONDS)
        self.guard = NoGuard()
        self.loop = EngineLoop(
            self.channel, Scheduler(limits), MemoryEngineRunner(settings), time.monotonic, self.guard
        )
        self.socket = ours
        self.peer = Peer(ours)
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.loop.run()
        except ChannelClosedError as error:
            self.error = error
        finally:
            self.channel.close(linger_seconds=1.0)


@contextmanager
def running_loop() -> Iterator[Running]:
    running = Running()
    running.thread.start()
    try:
        yield running
    finally:
        running.socket.close()
        running.thread.join(DEADLINE_SECONDS)
        assert not running.thread.is_alive()


def test_loop_pauses_for_a_reader_that_is_slow_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_UNSENT_BYTES", 2048)
    with running_loop() as running:
        running.peer.send(AddRequests(["a"], make_prompt(5), [make_sampling(400)], 0.0))
        assert running.guard.rests.wait(DEADLINE_SECONDS)
        assert running.channel.is_congested
        assert running.guard.num_steps < 400
        tokens: list[int] = []
        while len(tokens) < 400:
            for output in running.peer.read().outputs:
                tokens += output.token_ids
        assert tokens == expected_tokens(make_prompt(5), 400)


def test_requests_are_read_before_each_step_and_aborts_take_effect_in_the_next() -> None:
    with running_loop() as running:
        running.peer.send(AddRequests(["a"], make_prompt(5), [make_sampling(1500)], 0.0))
        while running.peer.read().gauges.num_running == 0:
            pass
        running.peer.send(AbortRequests(["a", "unknown"]))
        while (message := running.peer.read()).gauges.blocks_used:
            pass
        assert (message.gauges.num_running, message.gauges.num_added) == (0, 1)


def test_request_that_can_never_run_is_answered_with_the_reason() -> None:
    with running_loop() as running:
        running.peer.send(AddRequests(["a", "b"], make_prompt(5), [make_sampling(2000)] * 2, 0.0))
        while not (outputs := running.peer.read().outputs):
            pass
        assert [(output.request_id, output.finish_reason) for output in outputs] == [("a", "error"), ("b", "error")]
        assert all(output.error == "2005 tokens with max_tokens; the limit is 1600" for output in outputs)


def test_stop_ends_the_loop_even_with_requests_and_a_closed_socket_is_told() -> None:
    with running_loop() as running:
        running.peer.send(AddRequests(["a"], make_prompt(5), [make_sampling(1500)], 0.0))
        running.peer.send(Stop())
        running.thread.join(DEADLINE_SECONDS)
        assert running.error is None
    with running_loop() as gone:
        pass
    assert isinstance(gone.error, ChannelClosedError)
