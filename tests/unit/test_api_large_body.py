"""Large bodies are read another way, with the same result, and their number of JSON values is bounded."""

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from pagefleet_server.api import large_body
from pagefleet_server.api.errors import BadRequestError, describe_validation
from pagefleet_server.api.json_values import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES, check_strings, check_values
from pagefleet_server.api.large_body import parse_body
from pagefleet_server.api.protocol.chat import ChatBody
from pagefleet_server.api.protocol.completions import CompletionBody
from pagefleet_server.api.protocol.tokenizing import DetokenizeBody


def parse(raw: bytes, kind: type[BaseModel] = CompletionBody) -> BaseModel:
    return asyncio.run(parse_body(raw, kind))


@pytest.fixture(scope="module", params=[1, 7])
def tiny_slices(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every body counts as large, and every id, or every few, is a slice of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_body, "SMALL_BYTES", 0)
        patch.setattr(large_body, "SLICE_BYTES", request.param)
        yield


IDS = st.lists(st.integers(-2, 2**31 + 1) | st.integers(0, 99), max_size=12)
ODD: st.SearchStrategy[Any] = st.sampled_from([1.5, 1.0, "a", True, None, [], [[1]], {}])
PROMPTS = st.one_of(st.text('ab[,]\\"', max_size=9), IDS, st.lists(IDS, max_size=4), st.lists(st.text("a,[")), ODD)
PROMPTS |= st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=5)
PROMPTS |= st.tuples(IDS, ODD).map(lambda pair: [*pair[0], pair[1]])


@given(prompt=PROMPTS, indent=st.sampled_from([None, 1]), foo=PROMPTS, max_tokens=st.integers(0, 3), allowed=IDS | ODD)
@pytest.mark.usefixtures("tiny_slices")
def test_a_large_body_means_what_a_small_one_means(
    prompt: Any, indent: int | None, foo: Any, max_tokens: int, allowed: Any
) -> None:
    body = {"prompt": prompt, "foo": foo, "max_tokens": max_tokens, "allowed_token_ids": allowed}
    raw = json.dumps(body, indent=indent).encode()
    try:
        want = CompletionBody.model_validate_json(raw)
    except ValidationError:
        with pytest.raises(BadRequestError):
            parse(raw)
    else:
        assert parse(raw) == want


@pytest.mark.parametrize(
    "prompt",
    [
        "[1,]",
        "[,1]",
        "[1,,2]",
        "[1, ,2]",
        "[1 2]",
        "[01]",
        "[1",
        "[1]]",
        "[[1],]",
        "[[]]",
        "[[1],[]]",
        "[1,[2]]",
        "[[1] [2]]",
        "[[1],,[2]]",
        "[,[1]]",
        "[[1]2]",
        "[[1]]]",
        "[1e3]",
    ],
)
@pytest.mark.usefixtures("tiny_slices")
def test_a_list_that_is_not_json_is_refused_wherever_it_is_cut(prompt: str) -> None:
    with pytest.raises(BadRequestError):
        parse(f'{{"prompt": {prompt}}}'.encode())


def test_a_byte_order_mark_in_front_is_passed_over() -> None:
    """As vLLM does: `curl --data @file` sends what an editor wrote."""
    body = parse(b'\xef\xbb\xbf{"prompt": "a"}')
    assert isinstance(body, CompletionBody) and body.prompt == "a"


@pytest.mark.usefixtures("tiny_slices")
def test_ids_of_detokenize_are_read_the_same_way() -> None:
    body = parse(b'{"tokens": [3, 1, 2]}', DetokenizeBody)
    assert isinstance(body, DetokenizeBody) and body.tokens == [3, 1, 2]


@pytest.mark.parametrize(
    ("case", "body"),
    [
        ("objects", {"messages": [{}] * (MAX_CONTAINERS + 1)}),
        ("lists in an unknown field", {"foo": [[]] * (MAX_CONTAINERS + 1)}),
        ("numbers", {"foo": [1] * (MAX_VALUES + 1)}),
        ("texts", {"foo": [""] * (MAX_VALUES + 1)}),
        ("keys", {"foo": {str(number): 1 for number in range(MAX_VALUES + 1)}}),
        ("lists of ids", {"prompt": [[1]] * 60_000}),
        ("allowed ids", {"prompt": "a", "allowed_token_ids": [1] * 65_537}),
        ("fields", {str(number): 1 for number in range(MAX_STRINGS + 1)}),
    ],
)
def test_too_many_values_are_refused_before_they_are_made(case: str, body: dict[str, Any]) -> None:
    with pytest.raises(
        BadRequestError, match=r"too many (JSON values|texts and keys)|more than 1024 lists|at most 65536"
    ):
        parse(json.dumps(body).encode())


@pytest.mark.parametrize(
    "arguments",
    [
        ["[" + "[]," * MAX_CONTAINERS + "1]"],
        ["[" + "1," * MAX_VALUES + "1]"],
        ["{" + ",".join(f'"{number}": 1' for number in range(MAX_STRINGS)) + "}"],
        ["[" + "[]," * (MAX_CONTAINERS // 1000) + "1]"] * 1001,
    ],
    ids=["lists", "numbers", "keys", "many calls together"],
)
def test_arguments_of_tool_calls_may_have_as_many_values_as_a_body(arguments: list[str]) -> None:
    """They are a text of the body, and JSON of their own: a million lists in one of them took half a second."""
    calls = [{"function": {"name": "f", "arguments": text}} for text in arguments]
    body = ChatBody.model_validate({"messages": [{"role": "assistant", "tool_calls": calls}]})
    with pytest.raises(BadRequestError, match="too many"):
        body.template_messages  # noqa: B018  it raises


def test_fields_that_nobody_knows_are_not_looked_at_without_end() -> None:
    with pytest.raises(BadRequestError, match="50001 fields; at most 1024"):
        parse(json.dumps({"prompt": "a"} | {f"field{number}": 1 for number in range(50_000)}).encode())


def test_what_stands_in_texts_does_not_count() -> None:
    code = 'if (a[i], "b\\\\") { return {}; }\n' * 60_000
    check_strings(json.dumps({"prompt": code}).encode())
    check_values(json.dumps({"prompt": code}).encode())
    body = parse(json.dumps({"prompt": code}).encode())
    assert isinstance(body, CompletionBody) and body.prompt == code


def test_the_longest_honest_bodies_pass() -> None:
    part = [{"type": "text", "text": "a" * 20}]
    chat = {"messages": [{"role": "user", "content": part}] * 4096}
    assert len(getattr(parse(json.dumps(chat).encode(), ChatBody), "messages")) == 4096  # noqa: B009
    ids = list(range(65_536))
    assert parse(json.dumps({"prompt": ids, "allowed_token_ids": ids}).encode()) is not None


BAD = ["a"] * 20_000
COMPLAINTS: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (DetokenizeBody, {"tokens": BAD}),
    (CompletionBody, {"prompt": [1, *BAD]}),
    (CompletionBody, {"prompt": ["a", *([1] * 20_000)]}),
    (CompletionBody, {"prompt": "a", "allowed_token_ids": BAD}),
    (CompletionBody, {"prompt": "a", "logit_bias": {f"x{number}": "y" for number in range(20_000)}}),
    (CompletionBody, {"prompt": "a", "guided_choice": [1] * 20_000}),
    (CompletionBody, {"prompt": "a", "stop": [1] * 20_000}),
    (CompletionBody, {"prompt": "a", "stop_token_ids": BAD}),
    (CompletionBody, {"prompt": "a", "bad_words": [1] * 20_000}),
    (ChatBody, {"messages": [1] * 20_000}),
    (ChatBody, {"messages": [{"role": "user", "content": [1] * 20_000}]}),
    (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [1] * 20_000}]}),
    (ChatBody, {"messages": [{"role": "user", "content": "a"}], "documents": [1] * 20_000}),
    (ChatBody, {"messages": [{"role": "user", "content": "a"}], "tools": [1] * 20_000}),
]


@pytest.mark.parametrize(("kind", "body"), COMPLAINTS)
def test_a_body_of_nothing_but_faults_gives_few_complaints(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """A million wrong ids once took six seconds to complain about, with the event loop held."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate_json(json.dumps(body))
    assert refused.value.error_count() <= 300
    assert len(str(describe_validation(refused.value))) < 600


SIZES = [
    ("one list of ids", {"prompt": [7] * 60_000}),
    ("a list of one long list", {"prompt": [[7] * 60_000]}),
    ("one long list among short ones", {"prompt": [*[[1]] * 500, [7] * 60_000, *[[1]] * 500]}),
    ("many lists of ids", {"prompt": [[7] * 300] * 200}),
    ("allowed ids", {"prompt": "a", "allowed_token_ids": [7] * 60_000}),
]


@pytest.mark.parametrize(("case", "body"), SIZES)
def test_no_piece_that_is_read_at_once_is_long(
    case: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop has a turn between two of them: counted in bytes, because time depends on the machine."""
    longest = 0

    def watch(decoder: Any) -> Any:
        def decode(piece: bytes) -> Any:
            nonlocal longest
            longest = max(longest, len(piece))
            return decoder.decode(piece)

        return SimpleNamespace(decode=decode)

    monkeypatch.setattr(large_body, "_flat", watch(large_body._flat))
    monkeypatch.setattr(large_body, "_nested", watch(large_body._nested))
    read = parse(json.dumps(body).encode())
    assert all(getattr(read, name) == value for name, value in body.items())
    assert 0 < longest < large_body.SLICE_BYTES + 20
