"""Dumps every thread's stack to stderr when a step takes too long, even when it never lets go of the interpreter."""

import faulthandler
import sys
from collections.abc import Callable

REARM_SECONDS = 1.0
"""Arming starts a thread in C, so it is done at most so often; a dump may come this much early."""


class FaulthandlerGuard:
    """A StallGuard on faulthandler's own timer thread. stall_seconds should be well above REARM_SECONDS."""

    def __init__(self, stall_seconds: float, clock: Callable[[], float]) -> None:
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._armed_time: float | None = None

    def step_begins(self) -> None:
        """Start the timer anew (at most once per REARM_SECONDS)."""
        now = self._clock()
        if self._armed_time is None or now - self._armed_time >= REARM_SECONDS:
            faulthandler.dump_traceback_later(self._stall_seconds, repeat=True, file=sys.stderr)
            self._armed_time = now

    def idle(self) -> None:
        """Stop the timer."""
        if self._armed_time is not None:
            faulthandler.cancel_dump_traceback_later()
            self._armed_time = None
