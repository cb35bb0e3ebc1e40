"""The operator's clock: seconds since the epoch that never jump."""

import time
from collections.abc import Callable

Clock = Callable[[], float]


def steady_clock() -> Clock:
    """Wall time at this call, advanced by the monotonic clock: a jump of the wall clock scales nothing."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()
