"""Answer bodies: a stream, put together, says what the whole answer says."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet_server.api import reply as reply_module
from pagefleet_server.api.byte_detokenizer import ByteDetokenizer
from pagefleet_server.api.chat_reply import ChatReply
from pagefleet_server.api.completion_reply import CompletionReply
from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.generation import TOKENS_AT_ONCE, Choice, ChoicePlan, Usage, cut_output
from pagefleet_server.api.logprobs import Describe, TokenText
from pagefleet_server.api.output_text import Delta, OutputText, TextRules
from pagefleet_server.api.parsers.answer import AnswerParser
from pagefleet_server.api.parsers.choose import make_tool_parser
from pagefleet_server.api.parsers.reasoning import ReasoningSplitter
from pagefleet_server.api.reply import Reply
from pagefleet_server.client.request_stream import RequestStream
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import TokenLogprobs
from pagefleet_server.wire import RequestOutput

HEAD = {"id": "x", "created": 1, "model": "m"}
CALLS = '<think>\nhm\n</think>\n\nSure.<tool_call>{"name": "add", "arguments": {"a": [1]}}</tool_call>'
CALLS += '\n<tool_call>{"name": "sub", "arguments": {}}</tool_call>'


def describe(token_id: int) -> TokenText:
    return TokenText(chr(token_id), b"")


def chat_reply(
    *,
    tools: bool = False,
    reasoning: bool = False,
    shown: bool = True,
    logprobs: bool = False,
    describe: Describe = describe,
) -> ChatReply:
    def make_parser() -> AnswerParser:
        return AnswerParser(
            ReasoningSplitter(open_in_prompt=False) if reasoning else None,
            make_tool_parser("hermes", []) if tools else None,
        )

    common: dict[str, Any] = {"with_token_ids": False, "with_logprobs": logprobs, "with_reasoning": reasoning and shown}
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
    events = [asyncio.run(reply.opening(made)), *(reply.piece(made, delta) for delta in deltas)]
    return [as_read(event)["choices"][0] for event in events if event is not None]


def whole(reply: Reply, made: Choice, deltas: list[Delta]) -> dict[str, Any]:
    async def make() -> dict[str, Any]:
        for delta in deltas:
            await reply.note(made, delta)
        return await reply.whole([made], Usage(2, 3, 0))

    return as_read(asyncio.run(make()))


def as_read(document: dict[str, Any]) -> dict[str, Any]:
    """As a client gets it."""
    read: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(document))
    return read


def test_a_chat_answer_is_one_message() -> None:
    made, deltas = choice("a", "b")
    document = whole(chat_reply(), made, deltas)
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
    (answer,) = whole(chat_reply(tools=True, reasoning=True), made, deltas)["choices"]
    message = answer["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Sure.", "hm", "hm")
    assert answer["finish_reason"] == "tool_calls"
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
    made, deltas = choice("<think>hm</think>\n\nSure.")
    (answer,) = whole(chat_reply(reasoning=True, shown=False), made, deltas)["choices"]
    assert answer["message"] == {"role": "assistant", "content": "Sure.", "refusal": None}


def test_an_answer_cut_by_length_says_so_even_inside_a_call() -> None:
    made, deltas = choice('<tool_call>{"name": "add", "arguments": {"a"', finish_reason="length")
    (answer,) = whole(chat_reply(tools=True), made, deltas)["choices"]
    assert answer["finish_reason"] == "length"
    assert answer["message"]["tool_calls"][0]["function"]["arguments"] == '{"a"'
    assert answer["message"]["content"] is None


def test_held_back_text_makes_no_event_unless_tokens_are_wanted() -> None:
    made, deltas = choice("", "ab")
    silent = CompletionReply(HEAD, describe, with_token_ids=False, with_logprobs=False)
    assert [part["text"] for part in streamed(silent, made, deltas)] == ["ab", ""]
    telling = CompletionReply(HEAD, describe, with_token_ids=True, with_logprobs=False)
    parts = streamed(telling, made, deltas)
    assert [part["token_ids"] for part in parts] == [[], [0], [1], [99]]
    assert parts[0]["prompt_token_ids"] == [1, 2]


def logprobs_of(*token_ids: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-0.5 * token_id, 1, ((token_id + 1, -0.25),)) for token_id in token_ids]


@pytest.mark.parametrize("at_once", [1, 2, 1000])
@pytest.mark.parametrize("route", ["chat", "completion"])
def test_log_probabilities_say_the_same_however_they_are_cut(
    monkeypatch: pytest.MonkeyPatch, route: str, at_once: int
) -> None:
    monkeypatch.setattr(reply_module, "TOKENS_AT_ONCE", at_once)
    made, deltas = choice("a", "b", "c")
    deltas = [replace(delta, logprobs=tuple(logprobs_of(*delta.token_ids))) for delta in deltas]
    made.prompt_logprobs = logprobs_of(2)

    def make() -> Reply:
        if route == "chat":
            return chat_reply(logprobs=True)
        return CompletionReply(
            HEAD, describe, with_token_ids=False, with_logprobs=True, num_prompt_logprobs=1, echo=True
        )

    answer = whole(make(), made, deltas)["choices"][0]
    parts = [part["logprobs"] for part in streamed(make(), made, deltas) if part["logprobs"] is not None]
    joined = {
        name: [item for part in parts for item in part[name]] if isinstance(value, list) else value
        for name, value in parts[0].items()
    }
    assert answer["logprobs"] == joined
    tokens = [entry["token"] for entry in joined["content"]] if route == "chat" else joined["tokens"]
    assert tokens == (
        ["\x00", "\x01", "\x02", "c"] if route == "chat" else ["\x01", "\x02", "\x00", "\x01", "\x02", "c"]
    )
    if route == "completion":
        assert joined["text_offset"] == [0, 1, 2, 3, 4, 5]
        assert answer["prompt_logprobs"] == [
            None,
            {
                "3": {"logprob": -0.25, "rank": 1, "decoded_token": "\x03"},
                "2": {"logprob": -1.0, "rank": 1, "decoded_token": "\x02"},
            },
        ]


def test_log_probabilities_without_end_are_refused_before_they_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reply_module, "MAX_TOLD_BYTES", 1000)
    made, _ = choice("a")
    reply = chat_reply(logprobs=True)
    delta = Delta("a", (1,), logprobs=tuple(logprobs_of(1)))
    with pytest.raises(BadRequestError, match="ask for a stream") as raised:
        for _ in range(100):
            asyncio.run(reply.note(made, delta))
    assert raised.value.code == "answer_too_large"


@given(
    count=st.integers(0, 300),
    reason=st.sampled_from([None, "stop", "length"]),
    with_logprobs=st.booleans(),
)
def test_an_output_is_cut_without_loss(count: int, reason: str | None, with_logprobs: bool) -> None:
    ids = list(range(count))
    output = RequestOutput("r", ids, finish_reason=reason, logprobs=logprobs_of(*ids) if with_logprobs else None)
    pieces = list(cut_output(output))
    assert [token for piece, _, _ in pieces for token in piece] == ids
    assert [piece[1] for piece in pieces] == [None] * (len(pieces) - 1) + [reason]
    assert [item for _, _, told in pieces for item in told] == (output.logprobs or [])
    assert all(len(piece) <= TOKENS_AT_ONCE for piece, _, _ in pieces)


@pytest.mark.parametrize("route", ["chat", "completion"])
def test_no_turn_of_the_loop_writes_more_than_some_tokens(route: str) -> None:
    """What a turn costs is what it describes: counted here, measured in benchmarks/api_turns.py."""
    made, deltas = choice("a" * 50, "b" * 50)
    ids = tuple(range(32, 92))
    deltas = [Delta("x", ids, logprobs=tuple(logprobs_of(*ids))) for _ in range(20)]
    made.plan = replace(made.plan, prompt_token_ids=list(range(1000)))
    made.prompt_logprobs = logprobs_of(*range(1, 1000))
    described = most = 0

    def counted(token_id: int) -> TokenText:
        nonlocal described
        described += 1
        return describe(token_id)

    if route == "chat":
        reply: Reply = chat_reply(logprobs=True, describe=counted)
    else:
        reply = CompletionReply(
            HEAD, counted, with_token_ids=False, with_logprobs=True, num_prompt_logprobs=1, echo=True
        )

    async def watch() -> None:
        nonlocal described, most
        while True:
            described = 0
            await asyncio.sleep(0)
            most = max(most, described)

    async def make() -> None:
        watcher = asyncio.create_task(watch())
        await reply.opening(made)
        for delta in deltas:
            await reply.note(made, delta)
            await asyncio.sleep(0)  # a step of the engine brings one delta
        await reply.whole([made], Usage(1000, 1200, 0))
        watcher.cancel()

    asyncio.run(make())
    assert 0 < most <= 8 * TOKENS_AT_ONCE
