"""How many writes all objects together may send to the API server in any second, and who goes first. Pure.

Nobody waits with a write in hand: who may not write yet keeps a place in line, is told when to ask again, and looks
afresh at its object before it does.
"""

from collections import deque
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from itertools import takewhile

SECOND = 1.0
SOONEST_SECONDS = 0.02
"""Asking again earlier would be hot."""


class Rank(IntEnum):
    """What is written first when not everything can be; equals in the order in which they asked."""

    FIRST_WORD = 0
    """The first status of an object: somebody has just made it and looks."""
    DEED = 1
    """Replicas, children, deletion costs."""
    WORD = 2
    """Conditions and Events."""
    REPEAT = 3
    """Children that an operator which has just started applies once, as far as is known for nothing."""
    NUMBER = 4
    """A status whose numbers alone have changed."""


class _Booking:
    """Writes that may still be sent."""

    def __init__(self, writes: int) -> None:
        self.left = writes


_booking: ContextVar[_Booking | None] = ContextVar("booking", default=None)
"""Of the work that is going on: what it sends counts against it."""


class WriteBudget:
    """One per process. Sent in the last second + booked <= per_second, at every moment.

    Holds one place for each writer and rank at most.
    """

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._sent: deque[float] = deque()
        self._booked = 0
        self._lines: dict[Rank, dict[Hashable, int]] = {rank: {} for rank in Rank}
        self.busiest = 0
        """The most writes that went out in any second so far."""
        self.unbooked = 0
        """Writes that nobody had asked for; there are none."""

    def ask(self, who: Hashable, rank: Rank, writes: int, now: float) -> float:
        """0.0: these writes may be sent now, within `booked`. Else seconds until it is worth asking again."""
        writes = min(writes, self._per_second)
        line = self._lines[rank]
        line[who] = writes
        ahead = sum(sum(self._lines[better].values()) for better in Rank if better < rank)
        ahead += sum(line[other] for other in takewhile(lambda other: other != who, line))
        short = ahead + writes - self._room(now)
        if short <= 0:
            del line[who]
            return 0.0
        return max(SOONEST_SECONDS, self._until_free(short, now))

    def leave(self, who: Hashable, *, but: Collection[Rank] = ()) -> None:
        """Give up the places that are no longer needed."""
        for rank, line in self._lines.items():
            if rank not in but:
                line.pop(who, None)

    @contextmanager
    def booked(self, writes: int) -> Iterator[None]:
        """Send at most so many within; what is not sent is free again at the end."""
        booking = _Booking(min(writes, self._per_second))
        self._booked += booking.left
        token = _booking.set(booking)
        try:
            yield
        finally:
            _booking.reset(token)
            self._booked -= booking.left

    def sent(self, now: float) -> None:
        """A write goes out."""
        self._sent.append(now)
        self._forget(now)
        self.busiest = max(self.busiest, len(self._sent))
        booking = _booking.get()
        if booking is not None and booking.left:
            booking.left -= 1
            self._booked -= 1
        else:
            self.unbooked += 1

    @property
    def waiting(self) -> int:
        """Places that are held."""
        return sum(map(len, self._lines.values()))

    def _forget(self, now: float) -> None:
        while self._sent and self._sent[0] <= now - SECOND:
            self._sent.popleft()

    def _room(self, now: float) -> int:
        self._forget(now)
        return self._per_second - len(self._sent) - self._booked

    def _until_free(self, short: int, now: float) -> float:
        """Seconds until so many more writes fit, if everybody ahead writes as it may."""
        if short <= len(self._sent):
            return self._sent[short - 1] + SECOND - now
        return SECOND + (short - len(self._sent)) / self._per_second
