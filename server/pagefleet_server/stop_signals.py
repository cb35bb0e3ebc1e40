"""SIGTERM and SIGINT of the API process, from its first moment to its last."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from typing import Self


class StopSignals:
    """Whether the process was told to end. Make it in the running loop, in the main thread."""

    def __init__(self) -> None:
        self.terminated = asyncio.Event()
        """SIGTERM came: drain."""
        self.interrupted = asyncio.Event()
        """SIGINT came: end at once."""

    @contextlib.contextmanager
    def handled(self) -> Iterator[Self]:
        """Within, the signals do nothing but set their events. Afterwards they are ignored: the exit code is decided,
        and a late SIGTERM must not change it."""
        events = {signal.SIGTERM: self.terminated, signal.SIGINT: self.interrupted}
        for number, event in events.items():
            asyncio.get_running_loop().add_signal_handler(number, event.set)
        try:
            yield self
        finally:
            for number in events:
                signal.signal(number, signal.SIG_IGN)
