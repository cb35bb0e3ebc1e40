"""The comparison of two servers' answers sees what differs."""

import json
from dataclasses import replace
from pathlib import Path

from support.api_differences import CASES, Differences, Observation, compare, compare_metrics, listed, parse, texts_of


def test_the_comparison_sees_what_differs() -> None:
    found = Differences()
    case = CASES[0]
    ours = Observation(200, frozenset({"id: str", "x: null"}), ("'a' stop",))
    assert compare(case, ours, ours, found) and not found.rows()
    theirs = Observation(400, frozenset({"id: str", "x: number"}), ("'b' stop",))
    assert not compare(case, ours, theirs, found)
    assert json.dumps(found.as_json())
    assert len(found.rows()) == 1, "an answer of another status has another shape anyway"
    found = Differences()
    assert not compare(case, ours, replace(theirs, status=200), found)
    assert len(found.rows()) == 2


def test_null_is_as_good_as_nothing() -> None:
    found = Differences()
    ours, theirs = (Observation(200, frozenset(lines)) for lines in ({"id: str"}, {"id: str", "x: null"}))
    assert compare(CASES[0], ours, theirs, found)


def test_metrics_are_compared_by_name_type_and_labels() -> None:
    found = Differences()
    ours = '# TYPE vllm:a gauge\nvllm:a{engine="0"} 1\n# TYPE vllm:b counter\n# TYPE pagefleet_c gauge\n'
    theirs = '# TYPE vllm:a gauge\nvllm:a{engine="0",reason="x"} 1\n# TYPE vllm:b gauge\n# TYPE vllm:d gauge\n'
    compare_metrics(ours, theirs, found)
    assert {row[0] for row in found.rows()} == {"metric `vllm:a`", "metric `vllm:b`", "metric `vllm:d`"}


def test_a_stream_is_read_as_one_text() -> None:
    events = [
        {"choices": [{"index": 0, "text": part, "finish_reason": end}]} for part, end in (("a", None), ("b", "stop"))
    ]
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    assert list(texts_of(list(parse(text)))) == ["'ab' stop"]


def test_the_pages_tables_are_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "| Where | Ours | vLLM | Why |\n|---|---|---|---|\n| a `b` | 400 | `x\\|y` | because |\ntext | with | bars\n"
    )
    assert listed(page) == {("a `b`", "400", "`x\\|y`")}
