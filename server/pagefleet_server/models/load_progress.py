"""How far a start-up is, and in it the loading of the weights. Torch-free."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol


class Progress(Protocol):
    """Called as the start-up goes on."""

    def __call__(self, phase: str, message: str, /, *, done_bytes: int = 0, total_bytes: int = 0) -> None:
        """phase: load_weights, allocate_kv, warm_up. Bytes of the weights; total 0: not told."""


LoadProgress = Callable[[int, int], None]
"""Told (bytes that are loaded, bytes of all weights), as often as it goes on."""
POLL_SECONDS = 1.0
"""Between two looks at the memory of code that does not say how far it is."""


def tell_nobody(done_bytes: int, total_bytes: int) -> None:
    """A load that nobody waits for."""


@dataclass(slots=True)
class Paced:
    """Passes on what it is told, at most once in `seconds`, counted from when it was made, and the end."""

    tell: LoadProgress
    seconds: float
    clock: Callable[[], float] = time.monotonic
    _told: float = field(init=False)

    def __post_init__(self) -> None:
        self._told = self.clock()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """See LoadProgress."""
        now = self.clock()
        if now - self._told >= self.seconds or done_bytes >= total_bytes:
            self._told = now
            self.tell(done_bytes, total_bytes)


@contextlib.contextmanager
def told_by_memory(
    total_bytes: int,
    tell: LoadProgress,
    *,
    held_bytes: Callable[[], int],
    pause: Callable[[threading.Event], bool] = lambda ended: ended.wait(POLL_SECONDS),
) -> Iterator[None]:
    """While foreign code loads, and says nothing: what the process holds more than before counts as loaded. `pause`
    waits between two looks and says whether the load has ended."""
    ended = threading.Event()
    before = held_bytes()

    def follow() -> None:
        while not pause(ended):
            tell(max(0, min(total_bytes - 1, held_bytes() - before)), total_bytes)

    thread = threading.Thread(target=follow, daemon=True, name="load-progress")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    tell(total_bytes, total_bytes)


def describe(done_bytes: int, total_bytes: int) -> str:
    """`1.5 of 14.0 GiB (10 %)`."""
    gib = 1024**3
    return f"{done_bytes / gib:.1f} of {total_bytes / gib:.1f} GiB ({100 * done_bytes // max(1, total_bytes)} %)"
