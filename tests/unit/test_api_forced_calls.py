"""A forced tool call: its grammar takes exactly such calls, as the parser reads them."""

import pytest
from llguidance import LLMatcher, LLTokenizer

from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.grammar import compile_grammar
from pagefleet_server.api.parsers.forced import FORCING, forced_call
from pagefleet_server.tokenizer import load_tokenizer
from support.smollm2 import smollm2_gguf

TOKENIZER = load_tokenizer(smollm2_gguf()).tokenizer
ADD = ("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
SUB = ("sub", None)


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TOKENIZER.to_str(), eos_token=2)


def fits(tokenizer: LLTokenizer, kind: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer, compile_grammar(*forced_call(kind, [ADD, SUB])), log_level=0)
    return matcher.try_consume_tokens(tokens := TOKENIZER.encode(text).ids) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("kind", "text", "want"),
    [
        ("json", '{"name": "add", "parameters": {"a": 3}}', True),
        ("json", '{"name": "sub", "parameters": {"x": []}}', True),
        ("json", '{"name": "add", "parameters": {"a": "3"}}', False),
        ("json", '{"name": "mul", "parameters": {}}', False),
        ("json", "Sure.", False),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>', True),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', False),
        ("hermes", '{"name": "add", "arguments": {"a": 3}}', False),
    ],
)
def test_the_grammar_takes_calls_that_fit(tokenizer: LLTokenizer, kind: str, text: str, want: bool) -> None:
    assert fits(tokenizer, kind, text) is want


@pytest.mark.parametrize("kind", sorted(FORCING))
def test_a_schema_that_cannot_be_had_is_refused(kind: str) -> None:
    with pytest.raises(BadRequestError):
        compile_grammar(*forced_call(kind, [("f", {"type": "objekt"})]))


@pytest.mark.parametrize("kind", sorted(FORCING))
def test_a_schema_with_quotes_and_breaks_stays_a_schema(kind: str) -> None:
    assert compile_grammar(*forced_call(kind, [("f", {"enum": ['"x"\n\\', "/* %json"]})]))
