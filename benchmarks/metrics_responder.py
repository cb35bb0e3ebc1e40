"""Many pods' /metrics in one lean process: one listening socket for each pod, answers made beforehand, no HTTP library.

A benchmark of the operator needs hundreds of scrapes a second answered by a machine that the operator shares. One line
on stdin sets the load of all pods: `rest` (each its own, constant), `change` (another one every second). The process
ends with its stdin.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self

VARIANTS = 97
"""Different loads; a prime, so that neighbours and seconds do not fall together."""
TOTAL_BLOCKS = 1000
PORT = 8000


def addresses(count: int) -> list[str]:
    """Loopback addresses of so many pods."""
    return [f"127.130.{index // 250}.{2 + index % 250}" for index in range(count)]


def answer(variant: int) -> bytes:
    """The whole HTTP answer of a pod under one of VARIANTS loads."""
    used = 1 + variant * (TOTAL_BLOCKS - 1) // VARIANTS
    label = 'model_name="m",engine="0"'
    lines = [
        f'pagefleet_kv_blocks{{state="free"}} {TOTAL_BLOCKS - used}',
        'pagefleet_kv_blocks{state="cached"} 0',
        f'pagefleet_kv_blocks{{state="used"}} {used}',
        f"pagefleet_kv_blocks_total {TOTAL_BLOCKS}",
        "pagefleet_kv_blocks_waiting 0",
        "pagefleet_requests_oldest_waiting_seconds 0",
        f"vllm:num_requests_running{{{label}}} {variant % 64}",
        f"vllm:num_requests_waiting{{{label}}} 0",
        "",
    ]
    body = "\n".join(lines).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@dataclass
class Load:
    """What all pods show."""

    changes: bool = False
    since: float = field(default_factory=time.monotonic)

    def variant(self, pod: int) -> int:
        """Of a pod at this moment."""
        second = int(time.monotonic() - self.since) if self.changes else 0
        return (pod * 31 + second * 17) % VARIANTS


class Pod(asyncio.Protocol):
    """One connection of a scraper: every request on it gets the pod's metrics."""

    def __init__(self, number: int, load: Load, answers: list[bytes]) -> None:
        self._number, self._load, self._answers = number, load, answers
        self._pending = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio.Protocol."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """A GET has no body: a request ends with its head."""
        self._pending += data
        while b"\r\n\r\n" in self._pending:
            _, _, self._pending = self._pending.partition(b"\r\n\r\n")
            self._transport.write(self._answers[self._load.variant(self._number)])


async def serve(count: int, *, ready: Callable[[], None], commands: Callable[[], Awaitable[str]]) -> None:
    """Answer for `count` pods until a command is empty."""
    load, answers = Load(), [answer(variant) for variant in range(VARIANTS)]
    loop = asyncio.get_running_loop()
    for number, address in enumerate(addresses(count)):
        await loop.create_server(lambda number=number: Pod(number, load, answers), address, PORT)  # type: ignore[misc]
    ready()
    while command := await commands():
        load.changes = command.strip() == "change"


@dataclass
class Responder:
    """The process: `async with Responder(count) as responder`."""

    count: int

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, str(self.count)), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        if await self._process.stdout.readline() != b"ready\n":
            raise RuntimeError("the metrics responder did not start")
        self.pid = self._process.pid
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def show(self, load: str) -> None:
        """`rest` or `change`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{load}\n".encode())
        await self._process.stdin.drain()


async def main() -> None:
    """For as many pods as the first argument says."""

    async def line() -> str:
        return await asyncio.to_thread(sys.stdin.readline)

    await serve(int(sys.argv[1]), ready=lambda: print("ready", flush=True), commands=line)


if __name__ == "__main__":
    asyncio.run(main())
