"""Clients that ask all the time, some over one connection each and some over a new one each time; and what failed."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp


@dataclass
class SteadyClients:
    """`async with` it around what must break nothing. Every answer but 200 is a failure, and nothing is retried."""

    url: str
    body: dict[str, Any]
    lasting: int = 2
    """Clients that keep their connection as long as the server lets them."""
    new: int = 2
    """Clients that open a connection for every request."""
    answered: Counter[str] = field(default_factory=Counter)
    """Requests by kind of client."""
    failures: list[str] = field(default_factory=list)
    _stopping: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        kinds = ["lasting"] * self.lasting + ["new"] * self.new
        self._tasks = [asyncio.create_task(self._client(kind)) for kind in kinds]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End after the requests that are under way."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _client(self, kind: str) -> None:
        timeout = aiohttp.ClientTimeout(total=60)
        while not self._stopping:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                await self._ask(session, kind)
                while kind == "lasting" and not self._stopping:
                    await self._ask(session, kind)

    async def _ask(self, session: aiohttp.ClientSession, kind: str) -> None:
        try:
            async with session.post(self.url, json=self.body) as response:
                text = await response.text()
                if response.status == 200:
                    self.answered[kind] += 1
                else:
                    self.failures.append(f"{kind}: {response.status} {text[:200]}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.failures.append(f"{kind}: {type(error).__name__}: {error}"[:300])
        if self.failures:
            await asyncio.sleep(0.1)  # a server that refuses is not asked in a hot loop
