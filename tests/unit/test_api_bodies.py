"""Request bodies: what is accepted, what is refused, and in which words."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from pagefleet_server.api.errors import BadRequestError, describe_validation
from pagefleet_server.api.protocol.chat import ChatBody, Message
from pagefleet_server.api.protocol.completions import CompletionBody
from pagefleet_server.api.protocol.fields import HARMLESS, MAX_NAMES, REFUSED, UnknownFields, check_extra
from pagefleet_server.api.protocol.tokenizing import TokenizeBody


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate_json(json.dumps({"prompt": "x", **fields}))


def chat(*messages: dict[str, Any], **fields: Any) -> ChatBody:
    return ChatBody.model_validate_json(json.dumps({"messages": messages, **fields}))


def refusal(body: str, kind: Any = CompletionBody) -> BadRequestError:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate_json(body)
    return describe_validation(refused.value)


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("", [""]),
    ],
)
def test_a_prompt_has_four_shapes(prompt: Any, want: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == want


@pytest.mark.parametrize("prompt", [[], [[]], [True], ["a", 1], [1, "a"], [-1], [2**40], 3, {}, [[1], "a"], [None]])
def test_other_prompts_are_refused_by_name(prompt: Any) -> None:
    assert str(refusal(json.dumps({"prompt": prompt})).param).startswith("prompt")


@pytest.mark.parametrize(
    ("fields", "want_param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": "3"}, "n"),
        ({"n": 129}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 100_000}, "stop"),
        ({"stop": "a" * 257}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, None),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": "NaN"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"echo": True, "logprobs": 1, "n": 2}, None),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"bad_words": [" "]}, "bad_words[0]"),
        ({"bad_words": ["a"] * 65}, "bad_words"),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(fields: dict[str, Any], want_param: str | None) -> None:
    assert refusal(json.dumps({"prompt": "x", **fields})).param == want_param


@pytest.mark.parametrize(
    "body",
    ["", "{", "[]", "3", "null", '{"prompt": "\\ud800"}', "[" * 100_000, '{"prompt": "x", "temperature": NaN}'],
)
def test_what_is_no_body_is_refused(body: str) -> None:
    """NaN, lone surrogates and deep nesting among them."""
    assert len(str(refusal(body))) < 300


def test_an_answer_never_repeats_the_prompt() -> None:
    assert "secret" not in str(refusal('{"prompt": {"secret": "secret words"}}'))


def test_null_means_not_given() -> None:
    body = completion(stop=None, temperature=None, max_tokens=None, n=None, stream=None, stream_options=None)
    assert (body.stop, body.temperature, body.n, body.stream) == (None, 1.0, 1, False)


def test_a_single_stop_string_is_a_list_of_one() -> None:
    assert completion(stop="a").stop == ["a"]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_field_that_would_change_the_result_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    for neutral in REFUSED[name]:
        assert check_extra({name: neutral}) == []
    with pytest.raises(BadRequestError, match=name):
        check_extra({name: {"something": "else"}})


def test_false_is_not_zero() -> None:
    """In JSON they are not, either."""
    assert check_extra({"use_beam_search": False}) == []
    with pytest.raises(BadRequestError):
        check_extra({"use_beam_search": 0})
    assert check_extra({"length_penalty": 1.0}) == []


def test_no_field_of_both_bodies_is_also_in_a_table() -> None:
    declared = set(CompletionBody.model_fields) & set(ChatBody.model_fields)
    assert declared & (set(REFUSED) | HARMLESS) == set()


def test_unknown_fields_are_told_once_and_remembered_within_a_bound() -> None:
    unknown = UnknownFields()
    assert check_extra({"foo": 1, "user": "me"}) == ["foo"]
    assert unknown.fresh(["foo", "bar"]) == ["foo", "bar"]
    assert unknown.fresh(["foo"]) == []
    told = unknown.fresh([f"f{i}" for i in range(10 * MAX_NAMES)])
    assert len(told) == MAX_NAMES - 2


def test_content_parts_become_one_text() -> None:
    body = chat({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]})
    assert body.template_messages == [{"role": "user", "content": "a\nb"}]


def test_a_part_that_is_no_text_is_refused() -> None:
    body = chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})
    with pytest.raises(BadRequestError, match="image_url") as refused:
        _ = body.template_messages
    assert refused.value.param == "messages[0].content[0]"


def test_tool_call_arguments_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    (message,) = chat({"role": "assistant", "content": None, "tool_calls": [call]}).template_messages
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": 1}


@pytest.mark.parametrize("arguments", ["{", "[" * 100_000, "9" * 100_000, '"\\ud800"', '{"a": "\\udc00"}', "NaN,"])
def test_tool_call_arguments_that_cannot_be_read_are_refused(arguments: str) -> None:
    message = Message(
        role="assistant", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    )
    with pytest.raises(BadRequestError, match="no JSON") as refused:
        message.to_template(3)
    assert refused.value.param == "messages[3].tool_calls"


@pytest.mark.parametrize(
    ("message", "want_param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"content": "x"}, "messages[0].role"),
        ("hello", "messages[0]"),
    ],
)
def test_a_broken_message_is_refused_by_name(message: Any, want_param: str) -> None:
    assert refusal(json.dumps({"messages": [message]}), ChatBody).param == want_param


def test_a_user_message_needs_content() -> None:
    with pytest.raises(BadRequestError, match="content is missing"):
        _ = chat({"role": "user"}).template_messages


def test_the_last_message_is_continued_or_answered_not_both() -> None:
    message = {"role": "assistant", "content": "x"}
    assert chat(message, continue_final_message=True, add_generation_prompt=False).continue_final_message
    assert "add_generation_prompt" in str(
        refusal(json.dumps({"messages": [message], "continue_final_message": True}), ChatBody)
    )


def test_top_logprobs_need_logprobs() -> None:
    message = {"role": "user", "content": "x"}
    assert chat(message, logprobs=True, top_logprobs=3).num_logprobs == 3
    assert chat(message, logprobs=True).num_logprobs == 0
    assert chat(message).num_logprobs is None
    assert "logprobs: true" in str(refusal(json.dumps({"messages": [message], "top_logprobs": 3}), ChatBody))


def test_tokenize_takes_a_prompt_or_messages() -> None:
    assert "either prompt or messages" in str(refusal("{}", TokenizeBody))
