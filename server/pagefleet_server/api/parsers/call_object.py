"""One tool call as a JSON object, read character by character: `{"name": "f", "arguments": {...}}`."""

import json
from enum import Enum

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
SPACE = frozenset(" \t\r\n")
VALUE_STARTS = frozenset('{["-0123456789tfn')


class _Phase(Enum):
    START = 0
    KEY = 1
    KEY_TEXT = 2
    COLON = 3
    VALUE = 4
    AFTER = 5


class JsonValue:
    """Knows when one JSON value is complete. Objects and lists by their brackets, texts by their quote; numbers and
    words end before the character that follows them."""

    def __init__(self) -> None:
        self.text = ""
        self.done = False
        self._depth = 0
        self._in_text = False
        self._escaped = False

    @property
    def is_text(self) -> bool:
        """Whether it is a JSON string."""
        return self.text.startswith('"')

    def feed(self, char: str) -> bool:
        """Whether the character belongs to the value."""
        if not self.text and char in SPACE:
            return False
        if self.text and not self._depth and not self._in_text and char in ",}] \t\r\n":
            self.done = True  # a number or a word has ended
            return False
        self.text += char
        if self._in_text:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_text = False
        elif char == '"':
            self._in_text = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        self.done = not self._in_text and self._depth <= 0 and char in '"}]'
        return True


class CallObject:
    """The name as soon as it is known, the arguments as they come."""

    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self.done = False
        self.failed = False
        """The text is no call; `raw` is all that was read."""
        self._phase = _Phase.START
        self._key = JsonValue()
        self._value = JsonValue()
        self._arguments = ""
        self._has_arguments = False

    def feed(self, char: str) -> None:
        """Read one more character. Not after done or failed."""
        self.raw += char
        match self._phase:
            case _Phase.VALUE:
                self._feed_value(char)
            case _Phase.KEY_TEXT:
                self._key.feed(char)
                if self._key.done:
                    self._phase = _Phase.COLON
            case _ if char in SPACE:
                pass
            case _Phase.START:
                self._expect(char == "{", _Phase.KEY)
            case _Phase.COLON:
                self._value = JsonValue()
                self._expect(char == ":", _Phase.VALUE)
            case _:
                self._feed_between(char)

    def take_arguments(self) -> str:
        """What has come of the arguments since the last call; nothing before the name is known."""
        if self.name is None:
            return ""
        if self.done and not self._has_arguments:
            self._has_arguments = True
            self._arguments = "{}"
        text, self._arguments = self._arguments, ""
        return text

    def _expect(self, holds: bool, then: _Phase) -> None:
        self._phase = then
        self.failed = not holds

    def _feed_between(self, char: str) -> None:
        """In front of a key, or behind a value."""
        if char == "}":
            self.done = True
            self.failed = self.name is None
        elif char == "," and self._phase is _Phase.AFTER:
            self._phase = _Phase.KEY
        elif char == '"' and self._phase is _Phase.KEY:
            self._key = JsonValue()
            self._key.feed(char)
            self._phase = _Phase.KEY_TEXT
        else:
            self.failed = True

    def _feed_value(self, char: str) -> None:
        if not self._value.text and char not in SPACE and char not in VALUE_STARTS:
            self.failed = True
            return
        belongs = self._value.feed(char)
        is_arguments = self._key.text.strip('"') in ARGUMENT_KEYS
        if is_arguments and belongs and not self._value.is_text:
            self._has_arguments = True
            self._arguments += char
        if not self._value.done:
            return
        self._phase = _Phase.AFTER
        if self._value.is_text:
            self._end_text(is_arguments)
        if not belongs:
            self._feed_after_scalar(char)

    def _end_text(self, is_arguments: bool) -> None:
        """A name, or arguments that were written as a text with JSON in it."""
        try:
            text: str = json.loads(self._value.text)
        except ValueError:
            self.failed = True
            return
        if is_arguments:
            self._has_arguments = True
            self._arguments += text
        elif self._key.text == '"name"':
            self.name = text

    def _feed_after_scalar(self, char: str) -> None:
        if char not in SPACE:
            self._feed_between(char)
