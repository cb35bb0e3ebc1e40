"""A model that gives no numbers for one request: that one fails with the reason, and nothing else changes."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagefleet_server.client.errors import EngineDeadError, RequestFailedError
from pagefleet_server.client.request_stream import RequestStream
from pagefleet_server.core.limits import SchedulerLimits
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.scheduler import Scheduler
from pagefleet_server.core.step import TokenLogprobs
from pagefleet_server.engine.exit_code import ExitCode
from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.paged_model import PagedModel
from pagefleet_server.runner.runner import Runner, StepError, build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings
from support.api_server import memory_server
from support.engine_clients import DEADLINE_SECONDS, engine, until
from support.kv_memory_runner import POISON_TOKEN_ID, expected_tokens
from support.memory_engine import make_settings
from support.scheduling import make_sampling
from support.stepping import quiet
from support.tiny_models import write_tiny_llama

NAN_TOKEN = 7
NUM_BLOCKS = 40


async def outcome(stream: RequestStream) -> tuple[list[int], str]:
    tokens: list[int] = []
    try:
        with stream:
            async for output in stream:
                tokens += output.token_ids
    except RequestFailedError as error:
        return tokens, str(error)
    return tokens, "fine"


def until_poison(prompt: list[int], count: int, seed: int = 0) -> tuple[list[int], str]:
    """What the engine without a model must give: tokens up to the one that poisons it."""
    tokens = expected_tokens(prompt, count, seed)
    if POISON_TOKEN_ID in prompt:
        return [], "poisoned"
    if POISON_TOKEN_ID in tokens[:-1]:
        return tokens[: tokens.index(POISON_TOKEN_ID) + 1], "poisoned"
    return tokens, "fine"


async def test_failing_requests_leave_the_others_alone() -> None:
    """Some fail at their first token, some after a few that were already sent, groups as a whole."""
    shared = [3, 1, 4, 1, 5, 9, 2, 6] * 3
    prompts = [[*shared[:length], tail] for length in (2, 9, 16, 24) for tail in (5, POISON_TOKEN_ID, 11, 17)]
    async with engine(make_settings("poison", num_blocks=40)) as client:
        for _ in range(3):
            alone = [client.submit(prompt, make_sampling(25)) for prompt in prompts]
            group = client.submit_group([*shared, POISON_TOKEN_ID], [make_sampling(5, seed=seed) for seed in range(3)])
            got = await asyncio.wait_for(asyncio.gather(*map(outcome, [*alone, *group])), DEADLINE_SECONDS)
            want = [until_poison(prompt, 25) for prompt in prompts]
            assert got == [*want, *[([], "poisoned")] * 3]
            assert {reason for _, reason in want} == {"fine", "poisoned"}
            assert any(tokens and reason == "poisoned" for tokens, reason in want)
        await until(lambda: not client.has_work, "all is over")
        assert client.gauges is not None and client.gauges.blocks_used == 0
    assert not client.on_death.done()


async def test_an_engine_that_fails_on_everything_ends_with_the_reason() -> None:
    async with engine(make_settings("broken-at-4")) as client:
        with pytest.raises(EngineDeadError, match="the model gives no numbers any more"):
            async for _ in client.submit([3], make_sampling(20)):
                pass
        assert (await client.on_death).return_code == ExitCode.STEP_FAILED


async def test_the_api_tells_it_plain_and_streamed(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "poison") as talk:
        fine: dict[str, Any] = {"prompt": [3, 3], "max_tokens": 2, "ignore_eos": True, "seed": 0}
        assert until_poison([3, 3], 2)[1] == "fine"
        bad = fine | {"prompt": [3, POISON_TOKEN_ID]}
        status, answer = await talk.post("/v1/completions", **bad)
        assert (status, answer["error"]["code"]) == (500, "request_failed")
        assert "poisoned" in answer["error"]["message"]
        assert (await talk.post("/v1/completions", **bad, n=3))[0] == 500
        prompt = next([3, tail] for tail in range(4, 40) if len(until_poison([3, tail], 30)[0]) in range(3, 12))
        events = await talk.stream(prompt=prompt, max_tokens=30, ignore_eos=True, seed=0)
        assert "choices" in events[0]
        assert ["poisoned" in event["error"]["message"] for event in events if "error" in event] == [True]
        assert (await talk.complete(**fine))["usage"]["completion_tokens"] == 2
        metrics = await talk.until_idle()
        assert metrics['vllm:request_success_total{finished_reason="error"}'] == 5


def runner_for(path: Path, dtype: str, executor: str = "auto") -> Runner:
    settings = EngineSettings(
        model=ModelSettings(model=str(path), device="cpu", dtype=dtype, threads=1, executor=executor),
        cache=CacheSettings(num_kv_blocks=NUM_BLOCKS),
    )
    return build_runner(settings, quiet)


@pytest.fixture(params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Runner:
    """Of a model whose NAN_TOKEN is embedded as NaN."""
    write_tiny_llama(tmp_path, seed=3)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][NAN_TOKEN] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return runner_for(tmp_path, request.param)


@dataclass
class Trace:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None


def play(runner: Runner, prompts: list[list[int]], **fields: Any) -> list[Trace]:
    scheduler = Scheduler(SchedulerLimits(NUM_BLOCKS, 16, 512, 8, 64))
    allowed = tuple(token for token in range(300) if token != NAN_TOKEN)
    params = SamplingParams(max_tokens=8, temperature=0.9, logprobs=2, allowed_token_ids=allowed, **fields)
    traces = [Trace() for _ in prompts]
    for index, prompt in enumerate(prompts):
        scheduler.add(str(index), prompt, params, arrival_time=0.0)
    while (output := scheduler.schedule(0.0)) is not None:
        for new in scheduler.update(output, runner.execute(output)):
            trace = traces[int(new.request_id)]
            trace.token_ids += new.token_ids
            trace.logprobs += new.logprobs or []
            trace.scores += new.prompt_logprobs or []
            trace.error = new.error
        scheduler.check_integrity()
    assert scheduler.counts().blocks_used == 0
    return traces


GOOD = [[20 + 3 * index % 200 for index in range(length)] for length in (1, 15, 16, 17, 40)]
BAD = [[NAN_TOKEN], [30] * 20 + [NAN_TOKEN], [NAN_TOKEN] + [30] * 70]


@pytest.mark.parametrize("fields", [{}, {"prompt_logprobs": 1}], ids=["drawn", "scored"])
def test_neighbours_keep_their_bits_in_the_batch_and_in_blocks_that_held_nan(
    runner: Runner, fields: dict[str, Any]
) -> None:
    want = play(runner, GOOD, **fields)
    assert all(trace.error is None and len(trace.token_ids) == 8 for trace in want)
    for _ in range(3):  # the blocks of the failed are used again by the others
        got = play(runner, [*BAD, *GOOD, *BAD], **fields)
        for trace in [*got[: len(BAD)], *got[-len(BAD) :]]:
            assert trace.error is not None and "no numbers" in trace.error and "nan" in trace.error
            assert trace.token_ids == []
        assert got[len(BAD) : -len(BAD)] == want


def test_what_a_failed_request_computed_is_never_found(runner: Runner) -> None:
    """Content of a block may be wrong by an accident of that moment: the next request computes it anew."""
    scheduler = Scheduler(SchedulerLimits(NUM_BLOCKS, 16, 512, 8, 64))
    for name in ("first", "second"):
        scheduler.add(name, [*[30] * 40, NAN_TOKEN], SamplingParams(max_tokens=2), arrival_time=0.0)
        output = scheduler.schedule(0.0)
        assert output is not None and output.scheduled[0].start == 0
        (new,) = scheduler.update(output, runner.execute(output))
        assert new.error is not None
        assert scheduler.counts().blocks_cached == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_without_numbers_is_told_at_the_start_or_when_it_breaks(tmp_path: Path, dtype: str) -> None:
    runner = runner_for(write_tiny_llama(tmp_path), dtype, executor="transformers")
    runner.check()
    assert isinstance(runner.model, PagedModel)
    with torch.no_grad():
        runner.model.module.get_parameter("model.embed_tokens.weight").fill_(torch.inf)
    with pytest.raises(StepError, match="no numbers any more"):
        runner.check()
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"nan.*at the first prompt, in {dtype}"):
        runner_for(tmp_path, dtype)
