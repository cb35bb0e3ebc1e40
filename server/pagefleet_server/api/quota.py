"""What one API key may ask for: so many requests a minute, so many at once."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pagefleet_server.api.admission import FinishRate
from pagefleet_server.api.errors import QuotaError, Refusal

MAX_LIMIT = 10**6


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one key, as its line in the key file says."""

    requests_per_minute: int | None = None
    """1..MAX_LIMIT; so many may come at once after a minute of silence. None: no limit."""
    concurrent_requests: int | None = None
    """1..MAX_LIMIT open at the same time. None: no limit."""
    admin: bool = False
    """May drain the server from another machine."""


class Quota:
    """A token bucket for the rate, a count for what is open. Requests that are refused cost nothing."""

    def __init__(self, limits: Limits, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._finishes = FinishRate(clock)
        self._num_open = 0
        self._limits = limits
        self._left = float(limits.requests_per_minute or 0)
        self._left_at = clock()

    @property
    def limits(self) -> Limits:
        """Those in force."""
        return self._limits

    def change(self, limits: Limits) -> None:
        """The key file has other limits now; what is open and what was used stays counted."""
        self._refill()
        before, self._limits = self._limits, limits
        most = float(limits.requests_per_minute or 0)
        self._left = most if before.requests_per_minute is None else min(self._left, most)

    @contextmanager
    def spend(self) -> Iterator[None]:
        """One request, from here to the end of the block. Raises QuotaError (429)."""
        self._check_concurrency()
        self._take()
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            self._finishes.note()

    def _check_concurrency(self) -> None:
        most = self._limits.concurrent_requests
        if most is not None and self._num_open >= most:
            raise QuotaError(
                Refusal(
                    "concurrency_limit",
                    f"{self._num_open} requests of this key are open and at most {most} may be at once",
                    self._finishes.seconds_for(self._num_open - most + 1),
                )
            )

    def _take(self) -> None:
        rate = self._limits.requests_per_minute
        if rate is None:
            return
        self._refill()
        if self._left < 1:
            seconds = (1 - self._left) * 60 / rate
            raise QuotaError(
                Refusal(
                    "rate_limit",
                    f"this key may send {rate} requests a minute; the next one in {seconds:.1f} s",
                    max(1, math.ceil(seconds)),
                )
            )
        self._left -= 1

    def _refill(self) -> None:
        rate, now = self._limits.requests_per_minute, self._clock()
        if rate is not None:
            self._left = min(float(rate), self._left + (now - self._left_at) * rate / 60)
        self._left_at = now
