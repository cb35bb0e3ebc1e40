"""`kubectl exec`: a process beside a container, spoken to in WebSocket frames of `v5.channel.k8s.io`.

The first byte of a frame is its channel: 0 stdin, 1 stdout, 2 stderr, 3 the final Status, 4 terminal size, 255 the end
of the channel named by the next byte (v5 only)."""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import struct
import termios
from dataclasses import dataclass, field

from aiohttp import WSMsgType, web

from pagefleet_localcluster.node.process import Command, Process

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR, STATUS, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
CHUNK_BYTES = 32 << 10
MAX_FRAME_BYTES = 4 << 20


@dataclass
class _Streams:
    """Our ends of the process's files, and the ends that it gets."""

    ours: dict[int, int] = field(default_factory=dict)
    """Channel -> file descriptor."""
    theirs: dict[int, int] = field(default_factory=dict)

    @classmethod
    def open(cls, *, tty: bool) -> "_Streams":
        if tty:
            master, slave = os.openpty()
            return cls({STDIN: os.dup(master), STDOUT: master}, {STDIN: slave, STDOUT: slave, STDERR: slave})
        (in_read, in_write), (out_read, out_write), (err_read, err_write) = os.pipe(), os.pipe(), os.pipe()
        return cls(
            {STDIN: in_write, STDOUT: out_read, STDERR: err_read},
            {STDIN: in_read, STDOUT: out_write, STDERR: err_write},
        )

    def close(self, channel: int | None = None) -> None:
        """Close one of our ends, or all of them."""
        for number in [channel] if channel is not None else list(self.ours):
            if (descriptor := self.ours.pop(number, None)) is not None:
                os.close(descriptor)


async def serve_exec(socket: web.WebSocketResponse, command: Command, *, stdin: bool, tty: bool) -> None:
    """Run `command` until it ends or the client goes away; the last frame is its Status."""
    streams = _Streams.open(tty=tty)
    try:
        process = Process(
            command, output=streams.theirs[STDOUT], error=streams.theirs[STDERR], input=streams.theirs[STDIN]
        )
    finally:
        for descriptor in set(streams.theirs.values()):
            os.close(descriptor)
    if not stdin and not tty:
        streams.close(STDIN)
    reader = asyncio.create_task(_read_client(socket, streams, process))
    writers = [
        asyncio.create_task(_send(socket, channel, streams.ours[channel])) for channel in streams.ours if channel
    ]
    try:
        code = await process.wait()
        await asyncio.gather(*writers)
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(bytes([STATUS]) + json.dumps(exit_status(code)).encode())
    finally:
        process.signal(signal.SIGKILL)
        for task in (reader, *writers):
            task.cancel()
        await asyncio.gather(reader, *writers, return_exceptions=True)
        streams.close()
        await socket.close()


def exit_status(code: int) -> dict[str, object]:
    """The Status object that says how a command ended."""
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


async def _send(socket: web.WebSocketResponse, channel: int, descriptor: int) -> None:
    """Copy what the process writes into frames until it has closed its end."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    os.set_blocking(descriptor, False)
    loop.add_reader(descriptor, ready.set)
    try:
        while True:
            await ready.wait()
            ready.clear()
            try:
                data = os.read(descriptor, CHUNK_BYTES)
            except BlockingIOError:
                continue
            except OSError:  # a terminal whose last user has gone
                return
            if not data:
                return
            await socket.send_bytes(bytes([channel]) + data)
    finally:
        loop.remove_reader(descriptor)


async def _read_client(socket: web.WebSocketResponse, streams: _Streams, process: Process) -> None:
    """Feed the process; when the client goes away, the process does too."""
    async for message in socket:
        if message.type is not WSMsgType.BINARY or not message.data:
            continue
        channel, data = message.data[0], message.data[1:]
        if channel == CLOSE and data[:1] == bytes([STDIN]):
            streams.close(STDIN)
        elif channel == RESIZE and STDIN in streams.ours and os.isatty(streams.ours[STDIN]):
            size = json.loads(data)
            window = struct.pack("HHHH", size["Height"], size["Width"], 0, 0)
            fcntl.ioctl(streams.ours[STDIN], termios.TIOCSWINSZ, window)
        elif channel == STDIN and STDIN in streams.ours:
            await _write(streams.ours[STDIN], data)
    process.signal(signal.SIGKILL)


async def _write(descriptor: int, data: bytes) -> None:
    """Write all of it, waiting while the process does not read. A process that closed its stdin drops it."""
    loop = asyncio.get_running_loop()
    os.set_blocking(descriptor, False)
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            ready = asyncio.Event()
            loop.add_writer(descriptor, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_writer(descriptor)
        except OSError:
            return
