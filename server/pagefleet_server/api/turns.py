"""Spreads work that comes all at once over turns of the event loop."""

import asyncio
from collections import deque


class Turns:
    """Lets `at_once` callers go on in each turn of the event loop, in the order they came.

    When hundreds of connections send in the same instant, all their handlers would run in one turn, and a probe that
    comes a millisecond later would wait for the last of them.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._left = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counts = False  # a new turn is due

    async def wait(self) -> None:
        """Return in a turn that has room: at once, if this one has and nobody waits."""
        loop = asyncio.get_running_loop()
        if not self._counts:
            self._counts = True
            loop.call_soon(self._begin_turn, loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        place: asyncio.Future[None] = loop.create_future()
        self._waiting.append(place)
        await place

    def _begin_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._at_once
        while self._left and self._waiting:
            place = self._waiting.popleft()
            if not place.done():  # whoever has left meanwhile takes no room
                place.set_result(None)
                self._left -= 1
        self._counts = self._left < self._at_once
        if self._counts:
            loop.call_soon(self._begin_turn, loop)
