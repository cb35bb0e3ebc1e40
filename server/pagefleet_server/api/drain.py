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
    def seconds_to_refusal(self) -> float:
        """Until new requests are refused; 0 when they are. Only after begin()."""
        return self._left(self._delay)

    @property
    def seconds_to_expiry(self) -> float:
        """Until what still runs is ended; 0 when it is time. Only after begin()."""
        return self._left(self._delay + self._timeout)

    def _left(self, span: float) -> float:
        if self._begun is None:
            raise RuntimeError("the drain has not begun")
        return max(0.0, self._begun + span - self._clock())
