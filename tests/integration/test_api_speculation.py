"""Answers with guessed tokens are the answers without; usage, metrics and the end of a text do not notice."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pagefleet_server.cli import BadSettingError, parse_settings
from support.api_server import Talk, memory_server

FLAGS = ("--speculative-tokens", "5", "--speculative-min-ngram", "1", "--speculative-max-num-seqs", "8")
BODIES: list[dict[str, Any]] = [
    {"max_tokens": 40},
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"max_tokens": 60, "n": 3, "seed": 4},
    {"max_tokens": 60, "stop": ["h"]},
    {"max_tokens": 60, "stop": ["gh", "hg", "ih"], "include_stop_str_in_output": True},
    {"max_tokens": 60, "stop": ["i"], "min_tokens": 20},
    {"max_tokens": 60, "stop_token_ids": [7]},
    {"max_tokens": 60, "stop_token_ids": [7], "min_tokens": 15},
    {"max_tokens": 60, "ignore_eos": True, "return_token_ids": True},
    {"max_tokens": 30, "logit_bias": {"7": 5}, "frequency_penalty": 1.0},
]
PROMPTS = ["ab", "ghighighi", "abcabcab"]


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from request to request, and without what became of guesses."""
    usage = {key: value for key, value in (answer.get("usage") or {}).items() if key != "completion_tokens_details"}
    return {"choices": answer["choices"], "usage": usage}


async def answers(talk: Talk) -> list[dict[str, Any]]:
    return [
        comparable(await talk.complete(prompt, **({"seed": 3} | body))) for prompt, body in product(PROMPTS, BODIES)
    ]


async def streamed(talk: Talk) -> list[tuple[str, Any, int]]:
    """Text, end and tokens of each answer; how many events brought it may differ."""
    found = []
    for body in BODIES:
        if "n" in body:
            continue
        events = await talk.stream(
            prompt="ghighighi", seed=2, stream_options={"include_usage": True}, model="letters", **body
        )
        choices = [choice for event in events[:-1] for choice in event["choices"]]
        text = "".join(choice["text"] for choice in choices)
        ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        found.append((text, ends, events[-2]["usage"]["completion_tokens"]))
    return found


async def test_answers_are_those_without_guesses(tmp_path: Path) -> None:
    names = ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total")
    async with memory_server(tmp_path / "plain", "loops") as talk:
        plain, plain_streams = await answers(talk), await streamed(talk)
        assert set((await talk.metrics(*names)).values()) == {0.0}
    async with memory_server(tmp_path / "guessing", "loops", *FLAGS) as talk:
        assert await answers(talk) == plain
        assert await streamed(talk) == plain_streams
        numbers = await talk.metrics(*names, "vllm:spec_decode_num_draft_tokens_total")
        accepted, drafted = (numbers[f"vllm:spec_decode_num_{what}_tokens_total"] for what in ("accepted", "draft"))
        assert 100 < accepted < drafted
        by_place = await talk.metrics("vllm:spec_decode_num_accepted_tokens_per_pos_total")
        assert len(by_place) == 5
        assert sum(by_place.values()) == accepted
        details = (await talk.complete("ghighighi", max_tokens=40, seed=3))["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 0
        later = await talk.metrics(*names, "vllm:spec_decode_num_draft_tokens_total")
        assert details["accepted_prediction_tokens"] == later[names[1]] - accepted
        assert sum(details.values()) == later["vllm:spec_decode_num_draft_tokens_total"] - drafted


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--speculative-tokens", "17"), "--speculative-tokens: 17 is out of bounds, it must be at most 16"),
        (("--speculative-tokens", "-1"), "--speculative-tokens: -1 is out of bounds, it must be at least 0"),
        (("--speculative-max-num-seqs", "0"), "--speculative-max-num-seqs: 0 is out of bounds"),
        (
            ("--speculative-min-ngram", "5"),
            "--speculative-max-ngram: 4 is less than --speculative-min-ngram 5; raise the first or lower the second",
        ),
    ],
)
def test_flags_that_cannot_work_are_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(BadSettingError, match=message):
        parse_settings(["--model", "x", *flags], {})
