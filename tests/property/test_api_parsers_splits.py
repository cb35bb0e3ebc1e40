"""Reasoning and tool calls come out the same however the text is cut."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet_server.api.parsers.answer import AnswerParser
from pagefleet_server.api.parsers.choose import detect_tool_parser, make_tool_parser
from pagefleet_server.api.parsers.reasoning import ReasoningSplitter, begins_in_reasoning

KINDS = ("hermes", "mistral", "json")
NAMES = ("get_weather", "add")
Calls = list[tuple[str, str]]
Result = tuple[str, str, Calls]


def run(pieces: list[str], kind: str | None, *, think: bool | None = None, parallel: bool = True) -> Result:
    """(reasoning, content, calls)."""
    parser = AnswerParser(
        None if think is None else ReasoningSplitter(open_in_prompt=think),
        None if kind is None else make_tool_parser(kind, NAMES),
        parallel=parallel,
    )
    reasoning, content, calls = "", "", list[tuple[str, str]]()
    for number, piece in enumerate([*pieces, ""]):
        parsed = parser.feed(piece, last=number == len(pieces))
        reasoning += parsed.reasoning
        content += parsed.content
        for call in parsed.calls:
            if call.name is not None:
                assert call.index == len(calls), "calls begin in order"
                calls.append((call.name, ""))
            calls[call.index] = (calls[call.index][0], calls[call.index][1] + call.arguments)
    assert parser.called == bool(calls) or not parallel
    return reasoning, content, calls


def cut(text: str, points: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(point % (len(text) + 1) for point in points)})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


POINTS = st.lists(st.integers(0, 400), max_size=40)
ARGUMENTS = st.dictionaries(
    st.text('ab"\\{}[]<>,:é', max_size=4),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text('ab"\\{}[]</>é\n', max_size=8),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("k}", max_size=2), inner, max_size=2),
        max_leaves=4,
    ),
    max_size=3,
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)


def write(kind: str, calls: list[tuple[str, dict[str, Any]]], content: str, *, ascii_only: bool) -> str:
    def dump(value: Any) -> str:
        return json.dumps(value, ensure_ascii=ascii_only)

    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    if kind == "hermes":
        return content + "\n".join(f"<tool_call>\n{dump(item)}\n</tool_call>" for item in objects)
    if kind == "mistral":
        return content + "[TOOL_CALLS]" + dump(objects)
    return "; ".join(dump({"name": item["name"], "parameters": item["arguments"]}) for item in objects)


@given(kind=st.sampled_from(KINDS), calls=CALLS, content=st.sampled_from(["", "Let me see.\n"]), points=POINTS)
def test_calls_come_out_as_they_were_written(
    kind: str, calls: list[tuple[str, dict[str, Any]]], content: str, points: list[int]
) -> None:
    """27 of 64 ways of cutting once gave empty arguments."""
    text = write(kind, calls, content, ascii_only=len(points) % 2 == 0)
    _, said, got = run(cut(text, points), kind)
    assert [(name, json.loads(arguments)) for name, arguments in got] == calls
    assert said == ("" if kind == "json" else content.strip())


@given(
    kind=st.sampled_from(KINDS),
    text=st.text(alphabet='ab<>/_tool_calTOOL_CALS[]{}",: \n', max_size=60)
    | st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", '{"name": "add", ', '"arguments": {"a": 1}}', "text ", "{"]
        ),
        max_size=8,
    ).map("".join),
    points=POINTS,
)
def test_broken_calls_come_out_the_same_for_every_cut(kind: str, text: str, points: list[int]) -> None:
    assert run(cut(text, points), kind) == run([text] if text else [], kind)


@given(kind=st.sampled_from(KINDS), text=st.text(alphabet="ab <>[]\n.", max_size=40).filter(lambda t: "{" not in t))
def test_text_without_a_call_is_content(kind: str, text: str) -> None:
    _, content, calls = run([text] if text else [], kind)
    assert (content, calls) == (text, [])


@given(
    thought=st.text("ab<\n", max_size=20),
    answer=st.text("ab</think>", max_size=20),
    open_in_prompt=st.booleans(),
    points=POINTS,
)
def test_reasoning_is_split_off(thought: str, answer: str, open_in_prompt: bool, points: list[int]) -> None:
    text = ("" if open_in_prompt else "\n<think>\n") + thought + "\n</think>\n\n" + answer
    reasoning, content, _ = run(cut(text, points), None, think=open_in_prompt)
    assert (reasoning, content) == (thought.strip("\n"), answer)


@given(text=st.text("ab<think>/ \n", max_size=20).filter(lambda t: "<think>" not in t), points=POINTS)
def test_an_answer_without_reasoning_is_untouched(text: str, points: list[int]) -> None:
    assert run(cut(text, points), None, think=False) == ("", text, [])


@pytest.mark.parametrize(
    ("kind", "text", "want_content", "want_calls"),
    [
        ("hermes", 'a<tool_call>{"name": "add"}</tool_call> b', "a b", [("add", "{}")]),
        ("hermes", 'a<tool_call>{"name": "add", "arguments": {"x": ', "a", [("add", '{"x": ')]),
        ("hermes", "a <tool_call>nothing</tool_call>", "a <tool_call>nothing</tool_call>", []),
        ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "add"}</tool_call>', "", [("add", '{"x": 1}')]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("add", '{"x": 1}')]),
        ("hermes", '<tool_call>{"name": , }</tool_call>', '<tool_call>{"name": , }</tool_call>', []),
        ("json", '{"city": "Paris"}', '{"city": "Paris"}', []),
        ("json", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
        ("json", '[{"name": "add", "arguments": {}}, {"name": "add"}]', "", [("add", "{}"), ("add", "{}")]),
        ("json", "[1, 2]", "[1, 2]", []),
        ("mistral", 'x[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add{}', "x", [("add", '{"a": 1}'), ("add", "{}")]),
        ("mistral", "[TOOL", "[TOOL", []),
    ],
)
def test_the_ways_in_which_models_write_calls(kind: str, text: str, want_content: str, want_calls: Calls) -> None:
    assert run([text], kind) == ("", want_content, want_calls)
    assert run(list(text), kind) == ("", want_content, want_calls)


def test_without_parallel_calls_the_first_one_counts() -> None:
    text = write("hermes", [("add", {"a": 1}), ("add", {"a": 2})], "", ascii_only=True)
    assert run([text], "hermes", parallel=False)[2] == [("add", '{"a": 1}')]


def test_reasoning_in_front_of_a_call_is_no_content() -> None:
    text = '<think>hm</think>\n\n<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert run([text], "hermes", think=False) == ("hm", "", [("add", "{}")])


def test_the_template_tells_which_parser_it_needs() -> None:
    assert detect_tool_parser("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert detect_tool_parser("{% if tools %}[TOOL_CALLS]{% endif %}") == "mistral"
    assert detect_tool_parser("{% if tools %}{{ tools | tojson }}{% endif %}") == "json"


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
OPENED = "<|assistant|>\n<think>\n"


@pytest.mark.parametrize(
    ("kind", "text", "want"),
    [
        (None, '{"city": "Paris"}', ("", '{"city": "Paris"}', [])),
        ("hermes", CALL, ("", "", [("add", '{"a": 1}')])),
    ],
)
def test_a_shape_is_no_reasoning_though_the_template_opened_the_marks(
    kind: str | None, text: str, want: Result
) -> None:
    """A forced call of a thinking model came as reasoning, with no call and nothing in content."""
    begins = begins_in_reasoning(OPENED, '{"grammars": [{"lark_grammar": "start: ..."}]}')
    assert run([text], kind, think=begins) == want


def test_a_free_output_and_a_shape_with_the_marks_begin_in_reasoning() -> None:
    assert begins_in_reasoning(OPENED, None)
    assert begins_in_reasoning(OPENED, r'{"rx": "[a-z ]*<\/think>(yes|no)"}')
    assert not begins_in_reasoning("<|assistant|>\n", None)
