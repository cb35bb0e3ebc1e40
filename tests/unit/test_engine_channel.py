"""The engine's end of the socket never blocks, loses nothing, and notices that nobody reads."""

import socket
from collections.abc import Iterator

import pytest

from pagefleet_server.engine.channel import MAX_UNSENT_BYTES, Channel, ChannelClosedError
from pagefleet_server.frames import FrameBuffer, encode_frame
from pagefleet_server.wire import AbortRequests, Failed


class ManualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def make_channel(end: socket.socket, clock: ManualClock | None = None) -> Channel:
    return Channel(end, clock=clock or ManualClock(), unread_timeout_seconds=10.0)


def congest(channel: Channel) -> int:
    """Send until the channel is congested; gives the number of messages."""
    sent = 0
    while not channel.is_congested:
        channel.send(Failed(f"{sent} " + "x" * 100_000))
        sent += 1
    return sent


def test_receives_at_most_the_wanted_number_and_keeps_the_rest(ends: tuple[socket.socket, socket.socket]) -> None:
    channel = make_channel(ends[0])
    assert channel.receive(5) == []
    ends[1].sendall(b"".join(encode_frame(AbortRequests([str(index)])) for index in range(3)))
    assert channel.receive(2) == [AbortRequests(["0"]), AbortRequests(["1"])]
    channel.wait(60.0)  # returns at once: a message is there, though the socket is empty
    assert channel.receive(2) == [AbortRequests(["2"])]


def test_end_of_file_is_an_error(ends: tuple[socket.socket, socket.socket]) -> None:
    channel = make_channel(ends[0])
    ends[1].close()
    with pytest.raises(ChannelClosedError, match="closed the socket"):
        channel.receive(1)
    with pytest.raises(ChannelClosedError, match="closed the socket"):
        channel.send(Failed("x"))


def test_messages_to_a_slow_reader_are_kept_in_order_and_reported_as_congestion(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    channel = make_channel(ends[0])
    sent = congest(channel)
    assert sent * 100_000 > MAX_UNSENT_BYTES
    buffer = FrameBuffer()
    got: list[bytes] = []
    while len(got) < sent:
        channel.flush()
        buffer.feed(ends[1].recv(1 << 20))
        got += buffer.take(sent)
    assert not channel.is_congested
    assert [encode_frame(Failed(f"{index} " + "x" * 100_000))[4:] for index in range(sent)] == got


def test_reader_that_reads_nothing_for_too_long_ends_the_engine(ends: tuple[socket.socket, socket.socket]) -> None:
    clock = ManualClock()
    channel = make_channel(ends[0], clock)
    congest(channel)
    clock.now = 10.0
    channel.flush()
    clock.now = 10.1
    with pytest.raises(ChannelClosedError, match="read nothing for 10 s"):
        channel.flush()
    channel.close(linger_seconds=0.0)


def test_silence_before_a_message_does_not_count_as_an_unread_one(ends: tuple[socket.socket, socket.socket]) -> None:
    clock = ManualClock()
    channel = make_channel(ends[0], clock)
    clock.now = 1000.0
    congest(channel)
    clock.now = 1009.0
    channel.flush()
