"""Splits `<think>...</think>` from the answer behind it."""

from enum import Enum

from pagefleet_server.api.parsers.parsed import Parsed
from pagefleet_server.api.stop_strings import StopStrings

OPEN, CLOSE = "<think>", "</think>"
BREAKS = "\r\n"


def begins_in_reasoning(prompt: str, grammar: str | None) -> bool:
    """Whether an output's first token is reasoning, because the template has opened the marks. A shape holds from that
    token on: unless it closes them itself, the model answers at once, and a forced call or JSON is no reasoning."""
    return prompt.rstrip().endswith(OPEN) and (grammar is None or "think>" in grammar)


class _Phase(Enum):
    FRONT = 0
    """It may still become OPEN."""
    REASONING = 1
    GAP = 2
    """Line breaks behind CLOSE."""
    ANSWER = 3


class ReasoningSplitter:
    """Text is reasoning until CLOSE, when it begins with OPEN or the prompt already ended with it.

    feed() gives the text that is no reasoning. Line breaks next to the marks belong to the marks.
    """

    def __init__(self, *, open_in_prompt: bool) -> None:
        self._phase = _Phase.REASONING if open_in_prompt else _Phase.FRONT
        self._front = ""
        self._close = StopStrings([CLOSE])
        self._breaks = ""
        """Line breaks that stand in the reasoning if something follows them."""
        self._has_reasoning = False

    def feed(self, text: str, parsed: Parsed) -> str:
        """Reasoning goes to `parsed`, the rest is given back."""
        return "".join(self._feed_char(char, parsed) for char in text)

    def flush(self, parsed: Parsed) -> str:
        """At the end: what was held back."""
        if self._phase is _Phase.REASONING:
            self._reason(self._close.flush(), parsed)
        front, self._front = self._front, ""
        return front

    def _feed_char(self, char: str, parsed: Parsed) -> str:
        match self._phase:
            case _Phase.ANSWER:
                return char
            case _Phase.GAP:
                if char in BREAKS:
                    return ""
                self._phase = _Phase.ANSWER
                return char
            case _Phase.REASONING:
                scanned = self._close.feed(char)
                self._reason(scanned.text, parsed)
                if scanned.stop is not None:
                    self._phase = _Phase.GAP
                return ""
        self._front += char
        begun = self._front.lstrip()
        if begun == OPEN:
            self._front, self._phase = "", _Phase.REASONING
        elif not OPEN.startswith(begun):
            front, self._front, self._phase = self._front, "", _Phase.ANSWER
            return front
        return ""

    def _reason(self, text: str, parsed: Parsed) -> None:
        for char in text:
            if char in BREAKS:
                self._breaks += char
                continue
            parsed.reasoning += (self._breaks if self._has_reasoning else "") + char
            self._breaks, self._has_reasoning = "", True
