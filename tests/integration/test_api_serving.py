"""Completions and chats of a real server process with a tiny random model, started once."""

import asyncio
import json
import re
from typing import Any

import pytest

from support.api_server import Talk
from support.api_serving import CONTEXT, GREEDY, NAME, server, talk
from support.tiny_models import BOS_ID, EOS_ID, VOCAB_SIZE

__all__ = ["server", "talk"]


def joined(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events[:-1] for choice in event["choices"])


async def test_a_stream_says_what_the_whole_answer_says(talk: Talk) -> None:
    whole = await talk.complete("Hello", **GREEDY)
    events = await talk.stream(prompt="Hello", **GREEDY)
    assert events[-1] == "[DONE]"
    assert joined(events) == whole["choices"][0]["text"]
    assert {event["id"] for event in events[:-1]} == {events[0]["id"]}
    assert all("usage" not in event for event in events[:-1]), "usage comes only when asked for"
    assert whole["object"] == "text_completion" and whole["model"] == NAME
    assert events[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"


async def test_usage_counts_tokens(talk: Talk) -> None:
    whole = await talk.complete("Hello", **GREEDY)
    usage = whole["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 24, 29)
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await talk.stream(prompt="Hello", stream_options=options, **GREEDY)
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 24
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts) and counts[0] >= 1
    events = await talk.stream(prompt="Hello", stream_options={"include_usage": True}, **GREEDY)
    assert all(event["usage"] is None for event in events[:-2])


async def test_a_repeated_prompt_is_found_in_the_cache(talk: Talk) -> None:
    prompt = list(range(40, 100))
    await talk.complete(prompt, **GREEDY)
    usage = (await talk.complete(prompt, **GREEDY))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 48


async def test_token_ids_and_text_are_the_same_prompt(talk: Talk) -> None:
    status, tokens = await talk.post("/tokenize", prompt="Hello", return_token_strs=True)
    assert status == 200 and tokens["count"] == 5 and tokens["max_model_len"] == CONTEXT
    by_text = await talk.complete("Hello", return_token_ids=True, **GREEDY)
    by_ids = await talk.complete(tokens["tokens"], return_token_ids=True, **GREEDY)
    assert by_text["choices"] == by_ids["choices"]
    choice = by_ids["choices"][0]
    assert choice["prompt_token_ids"] == tokens["tokens"] and len(choice["token_ids"]) == 24
    status, text = await talk.post("/detokenize", tokens=tokens["tokens"])
    assert (status, text) == (200, {"prompt": "Hello"})
    events = await talk.stream(prompt="Hello", return_token_ids=True, **GREEDY)
    parts = [choice for event in events[:-1] for choice in event["choices"]]
    assert parts[0]["prompt_token_ids"] == tokens["tokens"]
    assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]


async def test_several_prompts_and_choices_come_in_order(talk: Talk) -> None:
    alone = [(await talk.complete(prompt, **GREEDY))["choices"][0]["text"] for prompt in ("one", "two")]
    answer = await talk.complete(["one", "two"], n=2, **GREEDY)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [alone[0], alone[0], alone[1], alone[1]]
    assert answer["usage"]["prompt_tokens"] == 6 and answer["usage"]["completion_tokens"] == 96
    events = await talk.stream(prompt=["one", "two"], n=2, **GREEDY)
    texts = ["", "", "", ""]
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [alone[0], alone[0], alone[1], alone[1]]


async def test_a_seed_gives_the_same_text_and_choices_differ(talk: Talk) -> None:
    fields = {"seed": 7, "max_tokens": 24, "ignore_eos": True}
    first = await talk.complete("Hello", n=3, **fields)
    second = await talk.complete("Hello", n=3, **fields)
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) == 3
    alone = await talk.complete("Hello", **{**fields, "seed": 9})
    assert alone["choices"][0]["text"] == texts[2], "choice i is drawn with seed + i"
    unseeded = {(await talk.complete("Hello", max_tokens=24))["choices"][0]["text"] for _ in range(3)}
    assert len(unseeded) > 1


async def test_a_stop_string_ends_the_text_wherever_it_is_cut(talk: Talk) -> None:
    whole = (await talk.complete("Hello", **GREEDY))["choices"][0]["text"]
    stop = whole[6:9]
    want = whole[: whole.index(stop)]
    answer = (await talk.complete("Hello", stop=stop, **GREEDY))["choices"][0]
    assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == (want, "stop", stop)
    events = await talk.stream(prompt="Hello", stop=[stop, "never"], **GREEDY)
    assert joined(events) == want
    kept = (await talk.complete("Hello", stop=stop, include_stop_str_in_output=True, **GREEDY))["choices"][0]
    assert kept["text"] == want + stop
    await talk.until_idle()


async def test_stop_tokens_end_the_output_and_minimum_lengths_hold(talk: Talk) -> None:
    ids = (await talk.complete("Hello", return_token_ids=True, **GREEDY))["choices"][0]["token_ids"]
    stop = ids[4]
    first = ids.index(stop)
    answer = await talk.complete("Hello", stop_token_ids=[stop], return_token_ids=True, **GREEDY)
    choice = answer["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == (ids[: first + 1], "stop", stop)
    assert answer["usage"]["completion_tokens"] == first + 1
    answer = await talk.complete("Hello", stop_token_ids=[stop], min_tokens=first + 2, **GREEDY)
    assert answer["usage"]["completion_tokens"] >= first + 2


async def test_rules_for_tokens_are_obeyed(talk: Talk) -> None:
    a, b, c = (await talk.post("/tokenize", prompt="abc"))[1]["tokens"]
    biased = await talk.complete("Hello", logit_bias={str(a): 100}, **{**GREEDY, "max_tokens": 4})
    assert biased["choices"][0]["text"] == "aaaa"
    allowed = await talk.complete("Hello", allowed_token_ids=[a, b], max_tokens=40, ignore_eos=True)
    assert set(allowed["choices"][0]["text"]) == {"a", "b"}
    fields = {"allowed_token_ids": [a, b, c], "bad_words": ["ab", "c"], "max_tokens": 40, "ignore_eos": True}
    text = (await talk.complete("Hello", **fields))["choices"][0]["text"]
    assert "ab" not in text and "c" not in text
    status, answer = await talk.post("/v1/completions", prompt="a", logit_bias={str(VOCAB_SIZE): 1})
    assert (status, answer["error"]["param"]) == (400, "logit_bias")
    status, answer = await talk.post("/v1/completions", prompt="a", allowed_token_ids=[EOS_ID], min_tokens=1)
    assert (status, answer["error"]["param"]) == (400, "allowed_token_ids")


async def test_log_probabilities_are_told_in_both_shapes(talk: Talk) -> None:
    fields = {**GREEDY, "max_tokens": 12, "return_token_ids": True}
    choice = (await talk.complete("Hello", logprobs=3, **fields))["choices"][0]
    told = choice["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["top_logprobs"]) == 12
    for token, value, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert 1 <= len(top) <= 3 and top[token] == value == max(top.values()) <= 0
    events = await talk.stream(prompt="Hello", logprobs=3, **fields)
    parts = [c["logprobs"] for event in events[:-1] for c in event["choices"] if c["logprobs"]]
    for name in told:
        assert [item for part in parts for item in part[name]] == told[name], name

    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 2, **fields}
    _, answer = await talk.post("/v1/chat/completions", **body)
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 12 and all(len(item["top_logprobs"]) == 2 for item in content)
    data = bytes(byte for item in content for byte in item["bytes"])
    assert data.decode(errors="replace") == choice["message"]["content"], "the bytes join to the text"
    events = await talk.stream("/v1/chat/completions", **body)
    parts = [c["logprobs"]["content"] for event in events[:-1] for c in event["choices"] if c["logprobs"]]
    assert [item for part in parts for item in part] == content
    assert (await talk.complete("Hello", **GREEDY))["choices"][0]["logprobs"] is None


async def test_a_prompt_is_scored_as_if_it_had_been_generated(talk: Talk) -> None:
    """What evaluation harnesses ask: echo, logprobs, one token, batches of token ids."""
    fields = {**GREEDY, "max_tokens": 100, "return_token_ids": True, "logprobs": 2}
    made = (await talk.complete("Hello", **fields))["choices"][0]
    prompt = made["prompt_token_ids"] + made["token_ids"]
    scoring: dict[str, Any] = {
        "echo": True,
        "logprobs": 2,
        "max_tokens": 1,
        "temperature": 0,
        "seed": 1,
        "ignore_eos": True,
    }
    answer = await talk.complete([prompt, prompt[:7]], **scoring)
    for choice, length in zip(answer["choices"], (105, 7), strict=True):
        told = choice["logprobs"]
        assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["text_offset"]) == length + 1
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        assert told["token_logprobs"][5:length] == made["logprobs"]["token_logprobs"][: length - 5]
        assert told["top_logprobs"][5:length] == made["logprobs"]["top_logprobs"][: length - 5]
    events = await talk.stream(prompt=[prompt], **scoring)
    parts = [part["logprobs"] for event in events[:-1] for part in event["choices"] if part["logprobs"]]
    for name, want in answer["choices"][0]["logprobs"].items():
        assert [item for part in parts for item in part[name]] == want, name

    scored = (await talk.complete(prompt, prompt_logprobs=1, max_tokens=1))["choices"][0]["prompt_logprobs"]
    assert len(scored) == 105 and scored[0] is None
    for token, entry, value in zip(prompt[5:], scored[5:], made["logprobs"]["token_logprobs"], strict=True):
        assert entry[str(token)]["logprob"] == value and entry[str(token)]["rank"] == 1
    body = {"messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 0, "max_tokens": 1}
    _, chat = await talk.post("/v1/chat/completions", **body)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "ok": {"type": "boolean"}, "n": {"enum": [1, 22]}},
    "required": ["color", "ok", "n"],
    "additionalProperties": False,
}


async def test_an_output_has_the_shape_that_was_asked_for(talk: Talk) -> None:
    """From a model that knows nothing: whatever it would rather say."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for seed in range(6):
        status, answer = await talk.post("/v1/chat/completions", response_format=schema, seed=seed, **body)
        assert status == 200, answer
        (choice,) = answer["choices"]
        value = json.loads(choice["message"]["content"])
        assert value["color"] in {"red", "green"} and isinstance(value["ok"], bool) and value["n"] in {1, 22}
        assert choice["finish_reason"] == "stop"
    answer = await talk.complete("x", guided_choice=["yes", "no, never"], n=8, seed=1, max_tokens=50)
    assert {choice["text"] for choice in answer["choices"]} <= {"yes", "no, never"}
    answer = await talk.complete("x", structured_outputs={"regex": "[0-9]{3}-[a-f]{2}"}, max_tokens=50)
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", answer["choices"][0]["text"])
    grammar = 'root ::= "a" number "z"\nnumber ::= [0-9] | [0-9] number'
    answer = await talk.complete("x", structured_outputs={"grammar": grammar}, max_tokens=100, temperature=0.1)
    assert re.match("a[0-9]+", answer["choices"][0]["text"])
    events = await talk.stream("/v1/chat/completions", response_format=schema, seed=3, **body)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert set(json.loads(text)) == {"color", "ok", "n"}
    plain = [await talk.complete("Hello", **GREEDY) for _ in range(2)]
    assert plain[0]["choices"] == plain[1]["choices"]
    await talk.until_idle()


async def test_a_shape_holds_beside_other_rules_and_neighbours(talk: Talk) -> None:
    """Grammar first: a rule that would forbid all that it allows gives way."""

    async def ask(seed: int) -> str:
        fields: dict[str, Any] = {"bad_words": ["yes"], "min_tokens": 6, "presence_penalty": 2.0, "seed": seed}
        return str((await talk.complete("x", guided_choice=["yes"], **fields))["choices"][0]["text"])

    assert await asyncio.gather(*(ask(seed) for seed in range(8))) == ["yes"] * 8


async def test_an_echo_stands_in_front(talk: Talk) -> None:
    text = (await talk.complete("Hello", **GREEDY))["choices"][0]["text"]
    assert (await talk.complete("Hello", echo=True, **GREEDY))["choices"][0]["text"] == "Hello" + text
    assert joined(await talk.stream(prompt="Hello", echo=True, **GREEDY)) == "Hello" + text


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_a_prompt_can_be_had_alone(talk: Talk, logprobs: int | None) -> None:
    """As evaluation harnesses ask for scores, and as OpenAI and vLLM answer: nothing that was drawn is told."""
    asked: dict[str, Any] = {"echo": True, "logprobs": logprobs, "return_token_ids": True, "seed": 1}
    more = await talk.complete("Hello you", max_tokens=1, **asked)
    alone = await talk.complete("Hello you", max_tokens=0, **asked)
    (choice,) = alone["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("Hello you", [], "length")
    assert alone["usage"]["completion_tokens"] == 0 and alone["usage"]["prompt_tokens"] == 9
    told = more["choices"][0]["logprobs"]
    want = None if told is None else {name: values[:9] for name, values in told.items()}
    assert choice["logprobs"] == want
    events = await talk.stream(prompt="Hello you", max_tokens=0, stream_options={"include_usage": True}, **asked)
    pieces = [event["choices"][0] for event in events[:-2]]
    assert "".join(piece["text"] for piece in pieces) == "Hello you" and pieces[-1]["finish_reason"] == "length"
    assert [len(piece["logprobs"]["tokens"]) for piece in pieces if piece["logprobs"]] == (
        [] if want is None else [9, 0]
    )
    assert events[-2]["usage"] == alone["usage"] | {"prompt_tokens_details": {"cached_tokens": 0}}
    status, answer = await talk.post("/v1/completions", prompt="Hello", max_tokens=0)
    assert (status, answer["error"]["param"]) == (400, "max_tokens") and "echo" in answer["error"]["message"]


async def test_chat_renders_the_models_template(talk: Talk) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    rendered = "<|im_start|>user\nHi</s>\n<|im_start|>assistant\n"
    status, tokens = await talk.post("/tokenize", messages=messages)
    _, by_text = await talk.post("/tokenize", prompt=rendered, add_special_tokens=False)
    assert status == 200 and tokens["tokens"] == by_text["tokens"]
    status, answer = await talk.post("/v1/chat/completions", messages=messages, **GREEDY)
    assert status == 200
    want = (await talk.complete(tokens["tokens"], **GREEDY))["choices"][0]["text"]
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": want, "refusal": None}
    events = await talk.stream("/v1/chat/completions", messages=messages, **GREEDY)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]) == want
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    _, by_parts = await talk.post("/v1/chat/completions", messages=parts, **GREEDY)
    assert by_parts["choices"] == answer["choices"]


async def test_tools_are_told_to_the_model_as_the_template_wants(talk: Talk) -> None:
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "return_token_ids": True, "max_tokens": 4}
    offered = {**body, "tools": [{"type": "function", "function": function}]}
    status, answer = await talk.post("/v1/chat/completions", **offered)
    assert status == 200, answer
    _, told = await talk.post("/detokenize", tokens=answer["prompt_token_ids"])
    assert told["prompt"].startswith(
        '<tool_call>[{"type": "function", "function": {"name": "add", "description": "Adds.'
    )
    for fields in ({}, {"tools": offered["tools"], "tool_choice": "none"}):
        _, answer = await talk.post("/v1/chat/completions", **body, **fields)
        _, told = await talk.post("/detokenize", tokens=answer["prompt_token_ids"])
        assert "add" not in told["prompt"]
    wrong = {"type": "function", "function": {"name": "a b"}}
    status, answer = await talk.post("/v1/chat/completions", **{**body, "tools": [wrong]})
    assert (status, answer["error"]["param"]) == (400, "tools[0].function.name")


async def test_a_tool_call_can_be_forced(talk: Talk) -> None:
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]
    tools.append({"type": "function", "function": {"name": "g", "parameters": {"enum": [{"a": 1}, {"a": 2}]}}})
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools[1:]}
    named = {**body, "tools": tools, "tool_choice": {"type": "function", "function": {"name": "g"}}}
    for asked in ({**body, "tool_choice": "required"}, named):
        for seed in range(3):
            status, answer = await talk.post("/v1/chat/completions", **asked, seed=seed)
            assert status == 200, answer
            (made,) = answer["choices"]
            (call,) = made["message"]["tool_calls"]
            assert call["function"]["name"] == "g"
            assert json.loads(call["function"]["arguments"]) in ({"a": 1}, {"a": 2})
            assert (made["finish_reason"], made["message"]["content"]) == ("tool_calls", None)
    events = await talk.stream("/v1/chat/completions", **named, seed=1)
    calls = [call for event in events[:-1] for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "g"
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) in ({"a": 1}, {"a": 2})
    shaped = {"response_format": {"type": "json_object"}, "tool_choice": "required"}
    status, answer = await talk.post("/v1/chat/completions", **body, **shaped)
    assert status == 400 and "exclude" in answer["error"]["message"]
    for wrong in ("always", {"type": "function", "function": {"name": "mul"}}, 3):
        status, answer = await talk.post("/v1/chat/completions", **body, tool_choice=wrong)
        assert status == 400 and "tool_choice" in answer["error"]["message"]


async def test_the_last_message_can_be_continued(talk: Talk) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    fields = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    _, tokens = await talk.post("/tokenize", **fields)
    _, text = await talk.post("/detokenize", tokens=tokens["tokens"])
    assert text["prompt"].endswith("assistant\nWell, ")
    status, answer = await talk.post("/v1/chat/completions", **fields, **GREEDY)
    assert status == 200 and answer["usage"]["prompt_tokens"] == tokens["count"]


async def test_a_templates_own_complaint_is_a_400(talk: Talk) -> None:
    """It once was a 500."""
    status, answer = await talk.post("/v1/chat/completions", messages=[{"role": "tool", "content": "x"}])
    assert status == 400 and "no tools in this house" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "want_words"),
    [
        ({"prompt": [5] * 250, "max_tokens": 7}, ["256", "257", "250", "7", "6"]),
        ({"prompt": [5] * 256}, ["256"]),
        ({"prompt": "a" * 300}, ["256", "300"]),
        ({"prompt": "a" * 100_000}, ["100000 bytes", "256"]),
        ({"prompt": ""}, ["no tokens"]),
        ({"prompt": [VOCAB_SIZE]}, [str(VOCAB_SIZE), "vocabulary"]),
        ({"prompt": "a", "min_tokens": 17}, ["17", "16"]),
        ({"prompt": "a", "prompt_logprobs": 21}, ["prompt_logprobs"]),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, ["prompt_logprobs", "stream"]),
        ({"prompt": "a", "echo": True, "logprobs": 1, "n": 2}, ["n = 1"]),
        ({"prompt": "a", "n": 1000}, ["n"]),
    ],
)
async def test_what_cannot_be_answered_is_refused_with_the_numbers(
    talk: Talk, fields: dict[str, Any], want_words: list[str]
) -> None:
    status, answer = await talk.post("/v1/completions", **fields)
    assert status == 400
    assert all(word in answer["error"]["message"] for word in want_words), answer


async def test_the_largest_request_fits(talk: Talk) -> None:
    answer = await talk.complete([5] * (CONTEXT - 1), max_tokens=1, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == CONTEXT
    status, answer = await talk.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], ignore_eos=True
    )
    assert (status, answer["usage"]["total_tokens"]) == (200, CONTEXT), "chat takes the rest of the context"


async def test_special_tokens_are_left_out_unless_asked_for(talk: Talk) -> None:
    assert (await talk.post("/detokenize", tokens=[BOS_ID, EOS_ID]))[1] == {"prompt": "<s></s>"}
    status, answer = await talk.post("/detokenize", tokens=[BOS_ID, 10**6])
    assert (status, answer["error"]["param"]) == (400, "tokens")
    body = {"tokens": [BOS_ID, EOS_ID], "skip_special_tokens": True}
    assert (await talk.post("/detokenize", **body))[1] == {"prompt": ""}
