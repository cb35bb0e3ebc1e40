"""Requests at and beyond every bound, over HTTP: a clear refusal or the right answer, and the engine lives."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from support.api_server import RunningServer, Talk, memory_command, running, write_letter_model
from support.kv_memory_runner import VOCAB_SIZE, expected_tokens

BLOCK_SIZE = 8
NUM_BLOCKS = 16
LIMIT = BLOCK_SIZE * NUM_BLOCKS
MAX_NUM_SEQS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("bounds")
    flags = ("--num-kv-blocks", str(NUM_BLOCKS), "--max-num-seqs", str(MAX_NUM_SEQS))
    with running(memory_command("fine", write_letter_model(path / "model"), *flags), path / "server.log") as server:
        server.wait_listening()
        yield server


@pytest.fixture
async def talk(server: RunningServer) -> AsyncIterator[Talk]:
    async with aiohttp.ClientSession(server.base_url) as session:
        talk = Talk(server, session)
        await talk.until_ready()
        yield talk


def prompt_of(length: int) -> list[int]:
    return [1 + 7 * index % (VOCAB_SIZE - 1) for index in range(length)]


async def check_answer(talk: Talk, prompt: list[int], count: int) -> None:
    """The engine without a model draws by hashing what it reads back from its blocks."""
    answer = await talk.complete(prompt, max_tokens=count, ignore_eos=True, seed=0, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == expected_tokens(prompt, count)


async def check_lives(talk: Talk) -> None:
    await check_answer(talk, prompt_of(5), 3)
    assert (await talk.until_idle())['vllm:request_success_total{finished_reason="error"}'] == 0
    assert "Traceback" not in talk.server.log


NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"nan"', "null", "true", "[]", "{}"]
SAMPLING = (
    *("temperature", "top_p", "min_p", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "min_tokens", "seed", "n", "logprobs", "priority"),
)


@pytest.mark.parametrize("field", SAMPLING)
async def test_values_that_are_no_numbers(talk: Talk, field: str) -> None:
    """null is "not given" everywhere; true is refused or taken for 1; the rest is refused by name."""
    for number in NUMBERS:
        body = f'{{"prompt": [3], "ignore_eos": true, "{field}": {number}}}'
        async with talk.session.post("/v1/completions", data=body, headers={"Content-Type": "application/json"}) as got:
            answer = await got.json()
        if got.status == 200:
            assert number in ("null", "true"), (body, answer)
            continue
        assert got.status == 400, (body, answer)
        assert answer["error"]["param"] == field or "JSON" in answer["error"]["message"], (body, answer)
    await check_lives(talk)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "no tokens"),
    ({"prompt": [VOCAB_SIZE]}, "vocabulary"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**40]}, "prompt"),
    ({"prompt": [2**70]}, ""),
    ({"prompt": [3, VOCAB_SIZE, 3]}, "vocabulary"),
    ({"logit_bias": {str(VOCAB_SIZE): 1.0}}, str(VOCAB_SIZE)),
    ({"logit_bias": {"-1": 1.0}}, "logit_bias"),
    ({"logit_bias": {str(2**70): 1.0}}, "logit_bias"),
    ({"logit_bias": {"3": 1e999}}, ""),
    ({"logit_bias": {"3": 101}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [VOCAB_SIZE]}, str(VOCAB_SIZE)),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"stop_token_ids": [-1], "min_tokens": 2}, "stop_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"n": 10**6}, "n"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 2**70}, ""),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
]


@pytest.mark.parametrize(("fields", "word"), REFUSED)
async def test_values_out_of_bounds(talk: Talk, fields: dict[str, Any], word: str) -> None:
    status, answer = await talk.post("/v1/completions", **({"prompt": [3], "ignore_eos": True} | fields))
    assert status == 400, answer
    assert word in f"{answer['error']['message']} {answer['error']['param']}", answer
    await check_lives(talk)


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_around_the_limit(talk: Talk, stream: bool) -> None:
    for length in (LIMIT - 2, LIMIT - 1):
        await check_answer(talk, prompt_of(length), LIMIT - length)
        status, answer = await talk.post(
            "/v1/completions", prompt=prompt_of(length), max_tokens=LIMIT - length + 1, stream=stream
        )
        assert status == 400, answer
        assert all(str(number) in answer["error"]["message"] for number in (length, LIMIT, LIMIT + 1)), answer
    for length in (LIMIT, LIMIT + 1, 3 * LIMIT):
        status, answer = await talk.post("/v1/completions", prompt=prompt_of(length), max_tokens=1, stream=stream)
        assert status == 400 and str(LIMIT) in answer["error"]["message"], answer
    await check_lives(talk)


async def test_lengths_around_every_block_boundary(talk: Talk) -> None:
    """Each twice: computed, then found in the cache; the output crosses a boundary, too."""
    assert await talk.post("/reset_prefix_cache") == (200, {"reset": True})
    assert (await talk.metrics())['pagefleet_kv_blocks{state="cached"}'] == 0
    for boundary in (BLOCK_SIZE, 2 * BLOCK_SIZE, 5 * BLOCK_SIZE):
        for length in (boundary - 1, boundary, boundary + 1):
            for count in (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1):
                await check_answer(talk, prompt_of(length), count)
                await check_answer(talk, prompt_of(length), count)
    await check_lives(talk)


async def test_more_choices_than_can_run_at_once_or_fit_at_once(talk: Talk) -> None:
    """n beyond the seats runs in groups; choices that do not fit together wait for each other."""
    prompt, count = prompt_of(LIMIT - 30), 30
    answer = await talk.complete(prompt, max_tokens=count, ignore_eos=True, n=2 * MAX_NUM_SEQS, return_token_ids=True)
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [count] * 2 * MAX_NUM_SEQS
    await check_lives(talk)
