"""Tool calls in the ways that models write them.

hermes   (Hermes, Qwen)   text <tool_call>{"name": "f", "arguments": {}}</tool_call> ...
mistral                   text [TOOL_CALLS][{"name": "f", "arguments": {}}, ...]   or   [TOOL_CALLS]f{}
json     (Llama 3 too)    {"name": "f", "parameters": {}}; ...   or a list of such objects, and nothing else
"""

from abc import ABC, abstractmethod
from collections.abc import Collection

from pagefleet_server.api.parsers.call_object import SPACE, CallObject, JsonValue
from pagefleet_server.api.parsers.parsed import Parsed
from pagefleet_server.api.stop_strings import StopStrings


class ToolParser(ABC):
    """Reads the answer's text; what is no call is content. `num_calls` counts those that began."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._space = ""
        """White space that is content only if content follows."""

    def feed(self, text: str, parsed: Parsed) -> None:
        """Read on."""
        for char in text:
            self._feed_char(char, parsed)

    @abstractmethod
    def flush(self, parsed: Parsed) -> None:
        """At the end: what was held back, and what turned out to be no call."""

    @abstractmethod
    def _feed_char(self, char: str, parsed: Parsed) -> None: ...

    def _say(self, text: str, parsed: Parsed) -> None:
        """Content; white space in front of, between and behind calls is left out."""
        for char in text:
            if char in SPACE:
                self._space += char
            else:
                parsed.content += self._space + char
                self._space = ""

    def _end_content(self, parsed: Parsed) -> None:
        if not self.num_calls:
            parsed.content += self._space
        self._space = ""

    def _tell(self, call: CallObject, parsed: Parsed, *, told: bool) -> bool:
        """Give out what is new of a call; whether its name has been told."""
        if call.name is not None and not told:
            parsed.begin_call(self.num_calls, call.name)
            self._space = ""
            self.num_calls += 1
            told = True
        if told:
            parsed.add_arguments(self.num_calls - 1, call.take_arguments())
        return told


class HermesParser(ToolParser):
    """`<tool_call>` ... `</tool_call>`."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._open = StopStrings([self.OPEN])
        self._close = StopStrings([self.CLOSE])
        self._call: CallObject | None = None
        self._told = False

    def _feed_char(self, char: str, parsed: Parsed) -> None:
        if self._call is None:
            scanned = self._open.feed(char)
            self._say(scanned.text, parsed)
            if scanned.stop is not None:
                self._call, self._told, self._close = CallObject(), False, StopStrings([self.CLOSE])
                self._open = StopStrings([self.OPEN])
            return
        if self._call.done:
            if self._close.feed(char).stop is not None:
                self._call = None
            return
        self._call.feed(char)
        if self._call.failed:
            self._give_up(parsed)
        else:
            self._told = self._tell(self._call, parsed, told=self._told)

    def flush(self, parsed: Parsed) -> None:
        """An unfinished call stays as far as it has been told."""
        if self._call is not None and not self._call.done:
            self._give_up(parsed)
        self._say(self._open.flush(), parsed)
        self._end_content(parsed)

    def _give_up(self, parsed: Parsed) -> None:
        call, self._call = self._call, None
        if call is not None and not self._told:
            self._say(self.OPEN + call.raw, parsed)


class JsonParser(ToolParser):
    """The whole answer is one call, or several, with nothing around them; anything else is content."""

    BETWEEN = SPACE | frozenset(";,[]")

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._call: CallObject | None = None
        self._told = False
        self._is_content = False
        self._front = ""
        """In front of the call that is being read."""

    def _feed_char(self, char: str, parsed: Parsed) -> None:
        if self._is_content:
            self._say(char, parsed)
        elif self._call is not None:
            self._call.feed(char)
            unknown = self._call.name is not None and self._call.name not in self._names
            if self._call.failed or unknown:
                self._give_up(parsed)
                return
            self._told = self._tell(self._call, parsed, told=self._told)
            if self._call.done:
                self._call = None
        elif char == "{":
            self._call, self._told = CallObject(), False
            self._call.feed(char)
        elif char in self.BETWEEN:
            self._front += char
        else:
            self._front += char
            self._give_up(parsed)

    def flush(self, parsed: Parsed) -> None:
        """An unfinished call stays as far as it has been told."""
        if self._call is not None or (self._front and not self.num_calls):
            self._give_up(parsed)
        self._end_content(parsed)

    def _give_up(self, parsed: Parsed) -> None:
        """From here on everything is content, unless a call has been told already: then the rest of it is lost."""
        front = "" if self.num_calls else self._front
        raw = "" if self._call is None or self._told else self._call.raw
        if self.num_calls and self._call is None:
            front = self._front.lstrip("".join(self.BETWEEN))
        self._call, self._front, self._is_content = None, "", True
        self._say(front + raw, parsed)


class MistralParser(ToolParser):
    """`[TOOL_CALLS]`, then a list of calls, or names each followed by their arguments."""

    OPEN = "[TOOL_CALLS]"
    ARGUMENTS = "[ARGS]"

    def __init__(self) -> None:
        super().__init__()
        self._open = StopStrings([self.OPEN])
        self._begun = False
        self._call: CallObject | None = None
        self._value: JsonValue | None = None
        self._told = False
        self._between = ""
        """Behind the mark, in front of the next object: its name, or brackets and commas."""

    def _feed_char(self, char: str, parsed: Parsed) -> None:
        if not self._begun:
            scanned = self._open.feed(char)
            self._say(scanned.text, parsed)
            self._begun = scanned.stop is not None
        elif self._call is not None:
            self._call.feed(char)
            if not self._call.failed:
                self._told = self._tell(self._call, parsed, told=self._told)
            if self._call.done or self._call.failed:
                self._call = None
        elif self._value is not None:
            self._value.feed(char)
            parsed.add_arguments(self.num_calls - 1, char)
            if self._value.done:
                self._value = None
        elif char == "{":
            self._begin_object(parsed)
        else:
            self._between += char

    def _begin_object(self, parsed: Parsed) -> None:
        name = self._between.replace(self.OPEN, "").replace(self.ARGUMENTS, "").strip(" \t\r\n,[]")
        self._between = ""
        if name:
            parsed.begin_call(self.num_calls, name)
            self._space = ""
            self.num_calls += 1
            self._value = JsonValue()
            self._value.feed("{")
            parsed.add_arguments(self.num_calls - 1, "{")
        else:
            self._call, self._told = CallObject(), False
            self._call.feed("{")

    def flush(self, parsed: Parsed) -> None:
        """What follows the mark and is no call is lost with it: it was never meant as content."""
        if not self._begun:
            self._say(self._open.flush(), parsed)
        self._end_content(parsed)
