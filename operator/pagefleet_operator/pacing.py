"""Turns for writes that can wait, shared by all objects: evenly spaced, however many want one at once. Pure."""

import math


class Pace:
    """Hands out moments that are at least 1/`per_second` seconds apart."""

    def __init__(self, per_second: float) -> None:
        self._gap = 1 / per_second
        self._last = -math.inf

    def next_turn(self, now: float) -> float:
        """The first free moment from `now` on, which is taken with this."""
        self._last = max(now, self._last + self._gap)
        return self._last
