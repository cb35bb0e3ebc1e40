"""The engine process as it ships, on a tiny model: an answer, a death, a model that is not there."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from pagefleet_server.client.engine_client import EngineClient
from pagefleet_server.client.errors import EngineDeadError
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.engine.exit_code import ExitCode
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings
from support.tiny_models import eager, eager_logits, write_tiny_llama

START_SECONDS = 120.0


@asynccontextmanager
async def started(model: Path, cache: CacheSettings | None = None) -> AsyncIterator[EngineClient]:
    settings = EngineSettings(
        model=ModelSettings(model=str(model), device="cpu", dtype="float32", threads=1), cache=cache or CacheSettings()
    )
    client = EngineClient(settings)
    try:
        await client.start()
        yield client
    finally:
        await client.stop(30.0)


def greedy(model: Path, prompt: list[int], count: int) -> list[int]:
    module, tokens = eager(model), list(prompt)
    for _ in range(count):
        tokens.append(int(torch.argmax(eager_logits(module, tokens)[-1])))
    return tokens[len(prompt) :]


async def test_answers_like_the_model_forks_and_scores_then_dies_loudly(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    prompt = [5 + 3 * index % 250 for index in range(40)]
    async with started(model, CacheSettings(num_kv_blocks=64)) as client:
        ready = await asyncio.wait_for(client.wait_ready(), START_SECONDS)
        assert (ready.num_blocks, ready.block_size) == (64, 16)
        assert set(ready.start_seconds) == {"load_weights", "allocate_kv", "warm_up"}
        sampling = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0, prompt_logprobs=0)
        streams = client.submit_group(prompt, [sampling, SamplingParams(max_tokens=12, temperature=0.0)])
        token_ids: list[list[int]] = [[], []]
        num_scores = num_logprobs = 0
        for index, stream in enumerate(streams):
            async for output in stream:
                token_ids[index] += output.token_ids
                num_scores += len(output.prompt_logprobs or [])
                num_logprobs += len(output.logprobs or [])
        assert token_ids == [greedy(model, prompt, 12)] * 2
        assert (num_scores, num_logprobs) == (39, 12)
        assert client.process_id is not None
        os.kill(client.process_id, signal.SIGKILL)
        killed = time.monotonic()
        assert (await asyncio.wait_for(client.on_death, START_SECONDS)).return_code == -signal.SIGKILL
        assert time.monotonic() - killed < 1.0


async def test_model_that_is_not_there_ends_it_with_the_reason(tmp_path: Path) -> None:
    async with started(tmp_path / "nowhere") as client:
        with pytest.raises(EngineDeadError, match="nowhere: no such file or directory") as dead:
            await asyncio.wait_for(client.wait_ready(), START_SECONDS)
        assert dead.value.return_code == ExitCode.BAD_MODEL


async def test_cache_too_small_for_a_token_ends_it_with_the_reason(tmp_path: Path) -> None:
    async with started(write_tiny_llama(tmp_path / "model"), CacheSettings(kv_cache_memory_bytes=1024)) as client:
        with pytest.raises(EngineDeadError, match=r"1024 .*block") as dead:
            await asyncio.wait_for(client.wait_ready(), START_SECONDS)
        assert dead.value.return_code in (ExitCode.BAD_MODEL, ExitCode.START_FAILED)
