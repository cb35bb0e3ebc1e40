"""Which tokens a grammar allows: followed along a history, rebuilt after it was dropped, bounded when it goes wrong."""

import contextlib
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import ScheduledRequest, TokenHistory
from pagefleet_server.grammar_limits import TOO_COMPLEX
from pagefleet_server.runner import grammars as runner_grammars
from pagefleet_server.runner.grammars import (
    KEPT_STEPS,
    MAX_BUILT,
    Grammars,
    GrammarTooComplexError,
    load_in_background,
)
from pagefleet_server.runner.sampler import sample
from pagefleet_server.tokenizer import load_tokenizer
from support.smollm2 import smollm2_gguf

TOKENIZER = load_tokenizer(smollm2_gguf()).tokenizer
END = 2
VOCAB_SIZE = 49152
YES_OR_NO = LLMatcher.grammar_from_lark('start: "yes" | "no"')


def make_request(
    grammar: str, text: str = "", *, request_id: str = "r", output: list[int] | None = None
) -> ScheduledRequest:
    """`output`: the tokens of `text`, when they are known."""
    output = TOKENIZER.encode(text, add_special_tokens=False).ids if output is None else output
    return ScheduledRequest(
        request_id=request_id,
        token_ids=(5,),
        start=3 + len(output),
        block_ids=(1,),
        sample=True,
        sampling=SamplingParams(max_tokens=50, grammar=grammar),
        history=TokenHistory(token_ids=[7, 8, 9, *output], num_prompt=3),
    )


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TOKENIZER.to_str(), n_vocab=VOCAB_SIZE, eos_token=END)


@pytest.fixture
def grammars(tokenizer: LLTokenizer) -> Grammars:
    return Grammars(lambda: tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=(END,))


def allowed_texts(grammars: Grammars, request: ScheduledRequest) -> set[str]:
    return {TOKENIZER.decode([int(i)], skip_special_tokens=False) for i in np.flatnonzero(grammars.allowed(request))}


def test_the_mask_follows_the_output(grammars: Grammars) -> None:
    assert {"y", "yes", "n", "no"} <= allowed_texts(grammars, make_request(YES_OR_NO))
    assert allowed_texts(grammars, make_request(YES_OR_NO, "ye")) == {"s"}
    assert allowed_texts(grammars, make_request(YES_OR_NO, "yes", request_id="other")) == {"<|im_end|>"}


def test_a_dropped_matcher_is_rebuilt_from_the_history(grammars: Grammars, tokenizer: LLTokenizer) -> None:
    grammars.allowed(make_request(YES_OR_NO))
    followed = grammars.allowed(make_request(YES_OR_NO, "n"))
    fresh = Grammars(lambda: tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=(END,))
    assert (followed == fresh.allowed(make_request(YES_OR_NO, "n"))).all()


def test_matchers_of_requests_that_have_ended_are_given_up(grammars: Grammars) -> None:
    for number in range(200):
        grammars.begin_step()
        grammars.allowed(make_request(YES_OR_NO, request_id=f"short{number}"))
        grammars.allowed(make_request(YES_OR_NO, "ye", request_id="long"))
    assert grammars.num_matchers <= KEPT_STEPS + 2
    for _ in range(KEPT_STEPS + 1):
        grammars.begin_step()
    assert grammars.num_matchers == 0
    assert allowed_texts(grammars, make_request(YES_OR_NO, "ye", request_id="long")) == {"s"}


def test_a_grammar_is_built_once_however_many_follow_it(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 outputs of one request with 128 tools stood still for 13 s: each built the same 100 ms again, in one step."""
    built: list[str] = []

    def build(tokenizer: LLTokenizer, grammar: str, **options: Any) -> LLMatcher:
        built.append(grammar)
        return LLMatcher(tokenizer, grammar, **options)

    monkeypatch.setattr(runner_grammars, "LLMatcher", build)
    for number in range(20):
        text = "ye" if number % 2 else ""
        want = {"s"} if number % 2 else {"y", "yes", "n", "no", "ye"}
        assert allowed_texts(grammars, make_request(YES_OR_NO, text, request_id=str(number))) <= want
    assert built == [YES_OR_NO]
    others = [LLMatcher.grammar_from_lark(f'start: "{number}"') for number in range(MAX_BUILT)]
    for number, grammar in enumerate(others):
        grammars.allowed(make_request(grammar, request_id=f"other {number}"))
    assert built == [YES_OR_NO, *others] and len(grammars._built) == MAX_BUILT


def test_requests_do_not_share_a_state(grammars: Grammars) -> None:
    grammars.allowed(make_request(YES_OR_NO, "ye", request_id="a"))
    assert "no" in allowed_texts(grammars, make_request(YES_OR_NO, request_id="b"))


@pytest.mark.parametrize("text", ["maybe", "yes and more", "too many items"])
def test_an_output_that_left_the_grammar_may_only_end(grammars: Grammars, text: str) -> None:
    assert allowed_texts(grammars, make_request(YES_OR_NO, text)) == {"<|im_end|>"}


@pytest.mark.parametrize(
    "grammar",
    [
        LLMatcher.grammar_from_regex("a{1,100000}{1,100000}{1,100000}"),
        LLMatcher.grammar_from_regex("(.*a){30}"),
        LLMatcher.grammar_from_lark("start: start start | start |"),
        LLMatcher.grammar_from_json_schema({"$ref": "#"}),
        "nonsense that the API would have refused",
    ],
)
def test_a_grammar_that_explodes_ends_the_output_and_nothing_else(grammars: Grammars, grammar: str) -> None:
    """The library's own limits hold: a step is not held up for long."""
    begun = time.monotonic()
    with contextlib.suppress(GrammarTooComplexError):  # the sampler tells the request
        mask = grammars.allowed(make_request(grammar))
        assert mask.shape == (VOCAB_SIZE,) and mask.any()
    assert time.monotonic() - begun < 5


AMBIGUOUS = [
    'start: s\ns: s s | "a" | s s s | "b"',
    'start: s\ns: s s s s s | s s | "a" | "b" | ""',
    'start: a a a a a a a a\na: "a"* | "a" a | a "a"',
    "start: X\nX: /.*a.{12}/ & /.*b.{14}/ & /.*c.{13}/",  # the lexer gives up, not the parser
]


@pytest.mark.parametrize("lark", AMBIGUOUS)
def test_a_grammar_with_too_many_readings_fails_its_request_alone(grammars: Grammars, lark: str) -> None:
    """Each token took longer than the one before, seconds by the hundredth, and every stream waited for it."""
    (letter,) = TOKENIZER.encode("a", add_special_tokens=False).ids
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, letter] = 1.0
    neighbour = ScheduledRequest("neighbour", (1,), 0, (1,), True, SamplingParams(max_tokens=1))
    for length in range(2000):
        request = make_request(LLMatcher.grammar_from_lark(lark), output=[letter] * length)
        result = sample(logits, [request, neighbour], grammars)
        assert "neighbour" in result.sampled
        if result.failed:
            break
    assert list(result.failed) == ["r"] and result.failed["r"].startswith(TOO_COMPLEX)


@pytest.mark.parametrize("delay_seconds", [0.0, 3600.0])
def test_the_tokenizer_is_made_in_the_background_or_when_it_is_needed(delay_seconds: float) -> None:
    grammars = load_in_background(
        smollm2_gguf(), vocab_size=VOCAB_SIZE, eos_token_ids=(END,), delay_seconds=delay_seconds
    )
    assert allowed_texts(grammars, make_request(YES_OR_NO, "n")) == {"o"}


def test_the_tokenizer_is_made_ahead_only_while_no_step_runs() -> None:
    slept: list[float] = []
    begun = threading.Event()

    def sleep(seconds: float) -> None:
        begun.wait(30)
        slept.append(seconds)
        ahead.num_steps += len(slept) <= 3  # a step ran meanwhile

    before = set(threading.enumerate())
    ahead = load_in_background(
        smollm2_gguf(), vocab_size=VOCAB_SIZE, eos_token_ids=(END,), delay_seconds=5.0, sleep=sleep
    )
    (thread,) = set(threading.enumerate()) - before
    begun.set()
    thread.join(30)
    assert not thread.is_alive() and slept == [5.0] * 4
