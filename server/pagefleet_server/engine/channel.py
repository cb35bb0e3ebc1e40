"""The engine's end of the socket: reads what is there, writes what fits, never waits longer than told."""

import select
import socket
from collections.abc import Callable

import msgspec

from pagefleet_server.frames import FrameBuffer, encode_frame
from pagefleet_server.wire import FromEngine, ToEngine

RECEIVE_BYTES = 256 * 1024
MAX_UNSENT_BYTES = 4 * 1024 * 1024
"""Above it the engine takes no further step until the API has read: nothing is lost, nothing grows."""


class ChannelClosedError(Exception):
    """The API process is gone, or has read nothing for too long."""


class Channel:
    """Non-blocking framed messages over a connected stream socket. Owns the socket."""

    def __init__(self, connection: socket.socket, *, clock: Callable[[], float], unread_timeout_seconds: float) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._clock = clock
        self._unread_timeout_seconds = unread_timeout_seconds
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._inbox = FrameBuffer()
        self._unsent = bytearray()
        self._sent_time = clock()  # when the socket last took something, or nothing was owed

    @property
    def is_congested(self) -> bool:
        """True when the API should read before more is produced."""
        return len(self._unsent) > MAX_UNSENT_BYTES

    def receive(self, max_messages: int) -> list[ToEngine]:
        """Messages that have arrived, at most so many; never waits.

        Raises ChannelClosedError on end of file, FrameError and msgspec.MsgspecError on bytes that are no message.
        """
        if not self._inbox.has_frame:
            self._fill_inbox()
        return [self._decoder.decode(body) for body in self._inbox.take(max_messages)]

    def send(self, message: FromEngine) -> None:
        """Write it, or keep what does not fit for the next flush(). Raises ChannelClosedError."""
        self._unsent += encode_frame(message)
        self.flush()

    def flush(self) -> None:
        """Write what fits. Raises ChannelClosedError, also when nothing was taken for the whole timeout."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                silent = self._clock() - self._sent_time
                if silent > self._unread_timeout_seconds:
                    raise ChannelClosedError(
                        f"the API process read nothing for {silent:.0f} s, {len(self._unsent)} bytes wait"
                    ) from None
                return
            except OSError as error:
                raise ChannelClosedError(f"the API process closed the socket ({error})") from error
            del self._unsent[:sent]
            self._sent_time = self._clock()
        self._sent_time = self._clock()

    def wait(self, timeout_seconds: float) -> None:
        """Return when something can be read, when unsent bytes can be written, or after the timeout."""
        if self._inbox.has_frame:
            return
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poll.poll(max(0.0, timeout_seconds) * 1000)

    def close(self, *, linger_seconds: float) -> None:
        """Write the rest, within a bound, and close. Never raises."""
        deadline = self._clock() + linger_seconds
        try:
            self.flush()
            while self._unsent and (left := deadline - self._clock()) > 0:
                select.select([], [self._socket], [], left)
                self.flush()
        except ChannelClosedError:
            pass  # nobody is there to read it
        self._socket.close()

    def _fill_inbox(self) -> None:
        while not self._inbox.has_frame:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosedError(f"the API process closed the socket ({error})") from error
            if not data:
                raise ChannelClosedError("the API process closed the socket")
            self._inbox.feed(data)
