"""Frames of the local socket: 4 bytes big-endian length, then that many bytes of one message."""

from collections.abc import Iterator

import msgspec

from pagefleet_server.wire import FromEngine, ToEngine

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A longer frame is a fault of the sender: the largest honest one is a prompt of the longest context."""


class FrameError(Exception):
    """The bytes are no valid frame; the connection cannot be trusted any more."""


_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    """One message with its length in front. Raises FrameError beyond MAX_FRAME_BYTES."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"message of {len(body)} bytes exceeds {MAX_FRAME_BYTES}; send it in parts")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class FrameBuffer:
    """Collects received bytes and cuts them into message bodies."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """Append what was received."""
        self._bytes += data

    def take(self, max_frames: int) -> Iterator[bytes]:
        """Yield at most max_frames complete bodies; the rest stays for the next call. Raises FrameError."""
        offset = 0
        try:
            for _ in range(max_frames):
                if len(self._bytes) - offset < HEADER_BYTES:
                    return
                length = int.from_bytes(self._bytes[offset : offset + HEADER_BYTES], "big")
                if length > MAX_FRAME_BYTES:
                    raise FrameError(f"frame of {length} bytes announced, at most {MAX_FRAME_BYTES} are allowed")
                end = offset + HEADER_BYTES + length
                if len(self._bytes) < end:
                    return
                body = bytes(self._bytes[offset + HEADER_BYTES : end])
                offset = end
                yield body
        finally:
            del self._bytes[:offset]

    @property
    def has_frame(self) -> bool:
        """True when take() would yield at least one body (or raise)."""
        if len(self._bytes) < HEADER_BYTES:
            return False
        length = int.from_bytes(self._bytes[:HEADER_BYTES], "big")
        return length > MAX_FRAME_BYTES or len(self._bytes) >= HEADER_BYTES + length

    def __len__(self) -> int:
        return len(self._bytes)
