"""Frames survive any cut of the byte stream, and nonsense is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet_server.frames import HEADER_BYTES, MAX_FRAME_BYTES, FrameBuffer, FrameError, encode_frame
from pagefleet_server.wire import AbortRequests


@given(st.lists(st.lists(st.text(max_size=5), max_size=3), max_size=6), st.integers(1, 7), st.integers(1, 3))
def test_messages_come_out_whole_however_the_bytes_are_cut(ids: list[list[str]], cut: int, max_frames: int) -> None:
    frames = [encode_frame(AbortRequests(some)) for some in ids]
    stream = b"".join(frames)
    buffer = FrameBuffer()
    bodies: list[bytes] = []
    for start in range(0, len(stream), cut):
        buffer.feed(stream[start : start + cut])
        while buffer.has_frame:
            taken = list(buffer.take(max_frames))
            assert 1 <= len(taken) <= max_frames
            bodies += taken
    assert bodies == [frame[HEADER_BYTES:] for frame in frames]
    assert len(buffer) == 0


def test_announced_length_beyond_the_bound_is_refused_before_it_is_collected() -> None:
    buffer = FrameBuffer()
    buffer.feed((MAX_FRAME_BYTES + 1).to_bytes(HEADER_BYTES, "big"))
    assert buffer.has_frame
    with pytest.raises(FrameError, match="at most"):
        list(buffer.take(1))


def test_message_beyond_the_bound_is_not_sent() -> None:
    with pytest.raises(FrameError, match="exceeds"):
        encode_frame(AbortRequests(["x" * (MAX_FRAME_BYTES + 1)]))
