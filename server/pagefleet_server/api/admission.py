"""How many requests may wait, and when to come back if that is too many."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

RATE_WINDOW_SECONDS = 30.0
MAX_FINISHES = 4096
MIN_RETRY_SECONDS = 1
MAX_RETRY_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Load:
    """What the server has taken on at this moment."""

    running: int
    """In the engine's batch."""
    waiting: int
    """In the engine's queue."""
    unread: int
    """Accepted, but not read by the engine yet: being tokenised, or on the way."""


@dataclass(frozen=True, slots=True)
class Room:
    """The bounds."""

    max_queue: int
    max_num_seqs: int

    @property
    def most(self) -> int:
        """More than this can never be accepted at once."""
        return self.max_queue + self.max_num_seqs


def count_excess(load: Load, room: Room, num_new: int) -> int:
    """How many of `num_new` requests are over the bound; 0 when they may come in.

    While the engine's queue is empty, its free seats take unread requests at once; otherwise something else than
    seats is short (blocks), and everything new will wait.
    """
    seats = max(0, room.max_num_seqs - load.running) if load.waiting == 0 else 0
    would_wait = load.waiting + max(0, load.unread + num_new - seats)
    return min(num_new, max(0, would_wait - room.max_queue))


class FinishRate:
    """Requests finished a second over the last RATE_WINDOW_SECONDS: how fast room comes free."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._finishes: deque[float] = deque(maxlen=MAX_FINISHES)

    def note(self) -> None:
        """One request has ended."""
        now = self._clock()
        self._finishes.append(now)
        self._forget(now)

    @property
    def num_noted(self) -> int:
        """Ends that are remembered."""
        return len(self._finishes)

    def seconds_for(self, count: int) -> int:
        """Whole seconds until `count` more have ended, between MIN_RETRY_SECONDS and MAX_RETRY_SECONDS."""
        now = self._clock()
        self._forget(now)
        if not self._finishes:
            return MAX_RETRY_SECONDS // 6
        span = max(1.0, now - self._finishes[0])
        seconds = math.ceil(count * span / len(self._finishes))
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, seconds))

    def _forget(self, now: float) -> None:
        """What is older than the window; each of ten thousand API keys has a rate of its own."""
        while self._finishes and self._finishes[0] < now - RATE_WINDOW_SECONDS:
            self._finishes.popleft()
