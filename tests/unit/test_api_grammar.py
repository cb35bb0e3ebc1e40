"""What a request says about the shape of its output: read, compiled, or refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.grammar import MAX_GRAMMAR_CHARS, compile_grammar, read_grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("response_format", "structures", "want"),
    [
        (None, None, None),
        ({"type": "text"}, {}, None),
        ({"type": "json_object"}, None, ("json_object", '{"type": "object"}')),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, None, ("json", json.dumps(SCHEMA))),
        (None, {"json": SCHEMA}, ("json", json.dumps(SCHEMA))),
        (None, {"json": json.dumps(SCHEMA)}, ("json", json.dumps(SCHEMA))),
        (None, {"json_object": True, "regex": None}, ("json_object", '{"type": "object"}')),
        (None, {"json_object": False}, None),
        (None, {"regex": "a+"}, ("regex", "a+")),
        (None, {"choice": ["a", "b"]}, ("choice", '["a", "b"]')),
        (None, {"grammar": "start: /a/"}, ("grammar", "start: /a/")),
    ],
)
def test_the_ways_of_asking(response_format: Any, structures: Any, want: tuple[str, str] | None) -> None:
    assert read_grammar(response_format, structures) == want


@pytest.mark.parametrize(
    ("response_format", "structures", "want_words"),
    [
        ({"type": "json_object"}, {"regex": "a"}, "only one shape"),
        (None, {"regex": "a", "choice": ["a"]}, "only one shape"),
        ({"type": "yaml"}, None, "response_format must be"),
        ({"type": "json_schema"}, None, "response_format must be"),
        ({"type": "json_schema", "json_schema": {"schema": "x"}}, None, "response_format must be"),
        (None, {"structural_tag": "x"}, "none of"),
        (None, {"choice": []}, "choice"),
        (None, {"choice": ["a", ""]}, "choice"),
        (None, {"choice": ["a"] * 2000}, "choice"),
        (None, {"regex": 3}, "regex"),
        (None, {"json": False}, "json takes a schema"),
        (None, {"regex": False}, "regex"),
        (None, {"choice": False}, "choice"),
        (None, {"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "at most"),
    ],
)
def test_other_ways_are_refused(response_format: Any, structures: Any, want_words: str) -> None:
    with pytest.raises(BadRequestError, match=want_words):
        read_grammar(response_format, structures)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json", '{"type": "object"}'),
        ("json_object", '{"type": "object"}'),
        ("regex", "[a-z]+(x|y){2,5}"),
        ("choice", json.dumps(['a "b" \\', "漢", "line\nbreak", "a | b"])),
        ("grammar", 'start: "a" b\nb: /[0-9]+/'),
        ("grammar", 'root ::= "a" b\nb ::= [0-9]+'),
    ],
)
def test_what_can_be_had_is_compiled(kind: str, source: str) -> None:
    assert compile_grammar(kind, source)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json", '{"type": "objekt"}'),
        ("json", "not json"),
        ("json", "true"),
        ("json", "[]"),
        ("json", '{"$ref": "#/definitions/none"}'),
        ("json", '{"$ref": "https://example.org/schema.json"}'),
        ("json", json.dumps({"$ref": "https://example.org/" + "a" * 5000})),
        ("json", '{"type": "number", "minimum": 1e308, "maximum": -1e308}'),
        ("json", '{"type": "string", "pattern": "("}'),
        ("json", '{"items":' * 2000 + "{}" + "}" * 2000),
        ("regex", "("),
        ("grammar", "start: nothing"),
        ("grammar", "root ::= nothing"),
        ("grammar", "root ::= " + "(" * 5000),
        ("grammar", ""),
    ],
)
def test_what_cannot_be_had_is_refused(kind: str, source: str) -> None:
    """A schema that validated but did not compile once killed an engine."""
    with pytest.raises(BadRequestError) as refused:
        compile_grammar(kind, source)
    assert refused.value.code == "invalid_grammar" and len(str(refused.value)) < 400


@given(
    kind=st.sampled_from(["json", "regex", "grammar"]),
    source=st.text('{}[]()"|:=*+?\\/.-,$# \nabrootstart0123456789', max_size=40),
)
def test_any_source_is_compiled_or_refused(kind: str, source: str) -> None:
    try:
        compile_grammar(kind, source)
    except BadRequestError:
        return
