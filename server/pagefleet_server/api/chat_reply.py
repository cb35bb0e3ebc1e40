"""Answer bodies of /v1/chat/completions: content, reasoning and tool calls."""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from pagefleet_server.api.generation import Choice, Usage
from pagefleet_server.api.logprobs import Told, chat_logprobs, join_packed
from pagefleet_server.api.output_text import Delta
from pagefleet_server.api.parsers.answer import AnswerParser
from pagefleet_server.api.parsers.parsed import CallPart, Parsed
from pagefleet_server.api.reply import Document, Reply, describe_end

CALL_ID_CHARS = 9
"""Mistral's templates want exactly so many letters and digits; everybody else takes anything."""


class ChatReply(Reply):
    """Each choice has its own parser; a stream and a whole answer are read by the same one."""

    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"

    def __init__(
        self, *args: Any, make_parser: Callable[[], AnswerParser], with_reasoning: bool, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._make_parser = make_parser
        self._with_reasoning = with_reasoning
        self._parsers: dict[int, AnswerParser] = {}

    def _prompt_ids(self, choice: Choice) -> Document:
        return {"prompt_token_ids": choice.plan.prompt_token_ids} if self._with_token_ids else {}

    async def whole(self, choices: Sequence[Choice], usage: Usage) -> Document:
        """What is told of the prompt stands beside the choices."""
        return await super().whole(choices, usage) | await self._prompt_logprobs(choices[0])

    async def _whole_choice(self, choice: Choice) -> Document:
        parser = self._make_parser()
        parsed = parser.feed("".join(choice.text), last=True)
        message: Document = {"role": "assistant", "content": parsed.content, "refusal": None}
        message |= self._reasoning(parsed)
        if parsed.calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = [_describe_call(call) for call in parsed.calls]
        body = {"index": choice.plan.index, "message": message} | self._end(parser, choice.last)
        noted = self._noted.get(choice.plan.index)
        return body | self._ids(choice.token_ids) | {"logprobs": join_packed(noted) if noted else None}

    async def _opening_choice(self, choice: Choice) -> Document:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.plan.index, "delta": delta, "logprobs": None} | describe_end(None)

    def _piece_choice(self, choice: Choice, delta: Delta) -> Document | None:
        parser = self._parsers.setdefault(choice.plan.index, self._make_parser())
        parsed = parser.feed(delta.text, last=delta.finish_reason is not None)
        change: Document = {"content": parsed.content} if parsed.content else {}
        if parsed.reasoning:
            change |= self._reasoning(parsed)
        if parsed.calls:
            change["tool_calls"] = [{"index": call.index, **_describe_call(call)} for call in parsed.calls]
        if not change and not self._must_tell(delta):
            return None
        body = {"index": choice.plan.index, "delta": change} | self._end(parser, delta)
        told = list(zip(delta.token_ids, delta.logprobs, strict=self._with_logprobs))
        return body | self._ids(delta.token_ids) | self._logprobs(choice, told)

    def _reasoning(self, parsed: Parsed) -> Document:
        """Under both names that clients know."""
        if not self._with_reasoning:
            return {}
        return {"reasoning_content": parsed.reasoning or None, "reasoning": parsed.reasoning or None}

    def _end(self, parser: AnswerParser, delta: Delta | None) -> Document:
        end = describe_end(delta)
        return end | {"finish_reason": "tool_calls"} if parser.called and end["finish_reason"] == "stop" else end

    def _logprobs(self, choice: Choice, told: Told) -> Document:
        if not self._with_logprobs:
            return {"logprobs": None}
        drawn = [(token_id, item) for token_id, item in told if item is not None]
        return {"logprobs": chat_logprobs(drawn, self._describe)}


def _describe_call(call: CallPart) -> Document:
    """The first piece of a call has id, type and name."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": uuid.uuid4().hex[:CALL_ID_CHARS], "type": "function", "function": function}
