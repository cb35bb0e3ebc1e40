"""Answer bodies: a stream, put together, says what the whole answer says."""

import json
from typing import Any

import pytest

from pagefleet_server.api.byte_detokenizer import ByteDetokenizer
from pagefleet_server.api.chat_reply import ChatReply
from pagefleet_server.api.completion_reply import CompletionReply
from pagefleet_server.api.generation import Choice, ChoicePlan, Usage
from pagefleet_server.api.logprobs import TokenText
from pagefleet_server.api.output_text import Delta, OutputText, TextRules
from pagefleet_server.api.parsers.answer import AnswerParser
from pagefleet_server.api.parsers.choose import make_tool_parser
from pagefleet_server.api.parsers.reasoning import ReasoningSplitter
from pagefleet_server.api.reply import Reply
from pagefleet_server.client.request_stream import RequestStream
from pagefleet_server.core.sampling_params import SamplingParams

HEAD = {"id": "x", "created": 1, "model": "m"}
CALLS = '<think>\nhm\n</think>\n\nSure.<tool_call>{"name": "add", "arguments": {"a": [1]}}</tool_call>'
CALLS += '\n<tool_call>{"name": "sub", "arguments": {}}</tool_call>'


def describe(token_id: int) -> TokenText:
    return TokenText(chr(token_id), b"")


def chat_reply(*, tools: bool = False, reasoning: bool = False, shown: bool = True) -> ChatReply:
    def make_parser() -> AnswerParser:
        return AnswerParser(
            ReasoningSplitter(open_in_prompt=False) if reasoning else None,
            make_tool_parser("hermes", []) if tools else None,
        )

    common: dict[str, Any] = {"with_token_ids": False, "with_logprobs": False, "with_reasoning": reasoning and shown}
    return ChatReply(HEAD, describe, make_parser=make_parser, **common)


def choice(*texts: str, finish_reason: str = "stop") -> tuple[Choice, list[Delta]]:
    plan = ChoicePlan(0, 0, [1, 2], SamplingParams(max_tokens=9), TextRules())
    made = Choice(plan, RequestStream("r", lambda _: None), OutputText(ByteDetokenizer(lambda _: b""), TextRules()))
    deltas = [Delta(text, (number,)) for number, text in enumerate(texts)]
    deltas.append(Delta("", (99,), finish_reason))
    made.text, made.last = list(texts), deltas[-1]
    made.token_ids = [token for delta in deltas for token in delta.token_ids]
    return made, deltas


def streamed(reply: Reply, made: Choice, deltas: list[Delta]) -> list[dict[str, Any]]:
    events = [reply.opening(made), *(reply.piece(made, delta) for delta in deltas)]
    return [event["choices"][0] for event in events if event is not None]


def test_a_chat_answer_is_one_message() -> None:
    made, deltas = choice("a", "b")
    document = chat_reply().whole([made], Usage(2, 3, 0))
    assert document["choices"][0]["message"] == {"role": "assistant", "content": "ab", "refusal": None}
    assert document["usage"]["total_tokens"] == 5
    parts = streamed(chat_reply(), made, deltas)
    assert [part["delta"] for part in parts] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert [part["finish_reason"] for part in parts] == [None, None, None, "stop"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_tool_calls_and_reasoning_come_in_both_ways(size: int) -> None:
    made, deltas = choice(*(CALLS[start : start + size] for start in range(0, len(CALLS), size)))
    (whole,) = chat_reply(tools=True, reasoning=True).whole([made], Usage(2, 3, 0))["choices"]
    message = whole["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Sure.", "hm", "hm")
    assert whole["finish_reason"] == "tool_calls"
    names = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert names == [("add", {"a": [1]}), ("sub", {})]

    parts = streamed(chat_reply(tools=True, reasoning=True), made, deltas)
    changes = [part["delta"] for part in parts]
    assert "".join(change.get("content", "") for change in changes) == "Sure."
    assert "".join(change.get("reasoning_content", "") for change in changes) == "hm"
    calls: dict[int, dict[str, str]] = {}
    for change in changes:
        for part in change.get("tool_calls", []):
            if "id" in part:
                calls[part["index"]] = {"name": part["function"]["name"], "arguments": ""}
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls.values()] == names
    assert parts[-1]["finish_reason"] == "tool_calls"
    assert all(change for change in changes[:-1]), "no event without anything in it"


def test_reasoning_can_be_left_out() -> None:
    made, _ = choice("<think>hm</think>\n\nSure.")
    (whole,) = chat_reply(reasoning=True, shown=False).whole([made], Usage(2, 3, 0))["choices"]
    assert whole["message"] == {"role": "assistant", "content": "Sure.", "refusal": None}


def test_an_answer_cut_by_length_says_so_even_inside_a_call() -> None:
    made, _ = choice('<tool_call>{"name": "add", "arguments": {"a"', finish_reason="length")
    (whole,) = chat_reply(tools=True).whole([made], Usage(2, 3, 0))["choices"]
    assert whole["finish_reason"] == "length"
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == '{"a"'
    assert whole["message"]["content"] is None


def test_held_back_text_makes_no_event_unless_tokens_are_wanted() -> None:
    made, deltas = choice("", "ab")
    silent = CompletionReply(HEAD, describe, with_token_ids=False, with_logprobs=False)
    assert [part["text"] for part in streamed(silent, made, deltas)] == ["ab", ""]
    telling = CompletionReply(HEAD, describe, with_token_ids=True, with_logprobs=False)
    parts = streamed(telling, made, deltas)
    assert [part["token_ids"] for part in parts] == [[], [0], [1], [99]]
    assert parts[0]["prompt_token_ids"] == [1, 2]
