"""The way out: when new requests are still served, when they are refused, when the process may end."""

from collections.abc import Callable


class Drain:
    """begin() starts it; everything else follows from the clock.

    begin                      + delay                                + delay + timeout
      |---- new ones served ----|---- 503, running ones finish --------|---- streams are ended
    """

    def __init__(self, *, delay_seconds: float, timeout_seconds: float, clock: Callable[[], float]) -> None:
        self._delay = delay_seconds
        self._timeout = timeout_seconds
        self._clock = clock
        self._begun: float | None = None

    def begin(self) -> bool:
        """Start draining; False when it had begun before: a second signal neither hurries nor restarts it."""
        if self._begun is not None:
            return False
        self._begun = self._clock()
        return True

    @property
    def active(self) -> bool:
        """Readiness is off and connections are closed after their answer."""
        return self._begun is not None

    @property
    def refuses(self) -> bool:
        """New requests get 503."""
        return self._begun is not None and self._clock() >= self._begun + self._delay

    @property
    def expired(self) -> bool:
        """What still runs is ended."""
        return self._begun is not None and self._clock() >= self._begun + self._delay + self._timeout

    def finished(self, num_open: int) -> bool:
        """Whether the process may end."""
        return self.expired or (self.refuses and num_open == 0)
