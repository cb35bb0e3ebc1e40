"""What parsers give out."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class CallPart:
    """A piece of one tool call."""

    index: int
    """Of the call in the message."""
    name: str | None = None
    """With the first piece."""
    arguments: str = ""
    """To be appended to what came before; the whole is the JSON that the model wrote."""


@dataclass(slots=True)
class Parsed:
    """What some text brought. Filled by a parser while it reads."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)

    def begin_call(self, index: int, name: str) -> None:
        """A call with this name begins."""
        self.calls.append(CallPart(index, name))

    def add_arguments(self, index: int, text: str) -> None:
        """More of its arguments."""
        if not text:
            return
        if self.calls and self.calls[-1].index == index:
            self.calls[-1].arguments += text
        else:
            self.calls.append(CallPart(index, arguments=text))
