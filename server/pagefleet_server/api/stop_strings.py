"""Ends a text at the first stop string, however the text is cut into pieces.

Each stop string is a Knuth-Morris-Pratt automaton: its state is the length of its longest prefix that the text ends
with. That length is also how much must be held back, no character more.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scanned:
    """What one piece brought."""

    text: str
    """To give out now."""
    stop: str | None = None
    """The stop string that ended the text; nothing may be fed after it."""


class StopStrings:
    """The first stop string to be complete ends the text; of two complete at one character, the longer."""

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._failures = [_failure(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._include = include_in_output
        self._held = ""

    def feed(self, piece: str) -> Scanned:
        """Scan the next piece of the text."""
        if not self._stops:
            return Scanned(piece)
        for index, char in enumerate(piece):
            stop = self._advance(char)
            if stop is not None:
                text = self._held + piece[: index + 1]
                self._held = ""
                return Scanned(text if self._include else text[: len(text) - len(stop)], stop)
        text = self._held + piece
        kept = len(text) - max(self._states)
        self._held = text[kept:]
        return Scanned(text[:kept])

    def flush(self) -> str:
        """At the end: what was held back and is no stop string after all."""
        text, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return text

    def _advance(self, char: str) -> str | None:
        found = None
        for index, (stop, failure) in enumerate(zip(self._stops, self._failures, strict=True)):
            state = self._states[index]
            while state and stop[state] != char:
                state = failure[state - 1]
            state += stop[state] == char
            self._states[index] = state
            if state == len(stop) and found is None:
                found = stop
        return found


def _failure(stop: str) -> list[int]:
    """failure[i]: the longest proper prefix of stop that stop[:i + 1] ends with."""
    failure = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = failure[length - 1]
        length += stop[index] == stop[length]
        failure[index] = length
    return failure
