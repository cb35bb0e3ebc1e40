"""One choice's text as reasoning, content and tool calls."""

from pagefleet_server.api.parsers.parsed import Parsed
from pagefleet_server.api.parsers.reasoning import ReasoningSplitter
from pagefleet_server.api.parsers.tools import ToolParser


class AnswerParser:
    """Reasoning first; what is none goes to the tool parser; without one it is content."""

    def __init__(
        self, reasoning: ReasoningSplitter | None = None, tools: ToolParser | None = None, *, parallel: bool = True
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel
        """False: only the first call counts."""

    @property
    def called(self) -> bool:
        """Whether a tool call has begun."""
        return self._tools is not None and self._tools.num_calls > 0

    def feed(self, text: str, *, last: bool) -> Parsed:
        """What the next piece brings; nothing may follow the last one."""
        parsed = Parsed()
        if self._reasoning is not None:
            text = self._reasoning.feed(text, parsed)
            if last:
                text += self._reasoning.flush(parsed)
        if self._tools is None:
            parsed.content += text
            return parsed
        self._tools.feed(text, parsed)
        if last:
            self._tools.flush(parsed)
        if not self._parallel:
            parsed.calls = [call for call in parsed.calls if call.index == 0]
        return parsed
