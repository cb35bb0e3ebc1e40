"""Never out of memory after ready: what the engine holds under any load stays inside what it said at its start."""

import asyncio
import re
from pathlib import Path

import pytest

from pagefleet_server.client.engine_client import EngineClient
from pagefleet_server.client.request_stream import RequestStream
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from support.evidence import write_evidence
from support.smollm2 import smollm2_gguf
from support.tiny_models import write_tiny_llama

START_SECONDS = 300.0


def promised(log: str) -> dict[str, int]:
    """The classes of bytes by name, and "together"."""
    (line,) = re.findall(r"memory in bytes: (.*)", log)
    classes = {name: int(count) for name, count in re.findall(r"([A-Za-z ]+?) (\d+)(?:,|;)", line)}
    return {name.strip(): count for name, count in classes.items()} | {"together": int(line.split()[-3])}


def peak_bytes(process_id: int) -> int:
    status = Path(f"/proc/{process_id}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def restart_peak(process_id: int) -> None:
    Path(f"/proc/{process_id}/clear_refs").write_text("5")


async def read(stream: RequestStream) -> tuple[int, int]:
    """Tokens and prompt tokens that were scored."""
    tokens = scores = 0
    with stream:
        async for output in stream:
            tokens += len(output.token_ids)
            scores += len(output.prompt_logprobs or ())
    return tokens, scores


async def load(client: EngineClient, *, longest: int, num_requests: int, vocab: int) -> None:
    """A full pool: a prompt of `longest` tokens that is scored, and beside it requests that ask for everything."""
    everything = {"logprobs": 20, "repetition_penalty": 1.2, "top_p": 0.95, "temperature": 1.5}
    scored = SamplingParams(max_tokens=4, prompt_logprobs=20, **everything)  # type: ignore[arg-type]
    streams = [client.submit([index * 7919 % vocab for index in range(longest)], scored)]
    for number in range(num_requests):
        prompt = [(number + index * 104729) % vocab for index in range(1 + 37 * number % 200)]
        samplings = [
            SamplingParams(max_tokens=24, seed=seed, bad_words=((5,), (6, 7)), **everything)  # type: ignore[arg-type]
            for seed in range(1 + number % 3)
        ]
        streams += client.submit_group(prompt, samplings)
    got = await asyncio.gather(*map(read, streams))
    assert got[0] == (4, longest - 1)
    assert all(tokens == 24 for tokens, _ in got[1:])


async def measure(
    settings: EngineSettings, capfd: pytest.CaptureFixture[str], *, longest: int, count: int
) -> dict[str, int]:
    client = EngineClient(settings)
    try:
        await client.start()
        ready = await asyncio.wait_for(client.wait_ready(), START_SECONDS)
        classes = promised(capfd.readouterr().err)
        assert client.process_id is not None
        restart_peak(client.process_id)
        await load(client, longest=longest, num_requests=count, vocab=ready.vocab_size)
        classes["peak"] = peak_bytes(client.process_id)
    finally:
        await client.stop()
    assert set(classes) >= {"weights", "KV", "activations", "engine process", "API process", "margin"}
    assert classes["peak"] <= classes["together"] - classes["API process"], classes
    return classes


async def test_a_small_model_under_load(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = EngineSettings(
        model=ModelSettings(model=str(write_tiny_llama(tmp_path)), device="cpu", threads=1),
        cache=CacheSettings(num_kv_blocks=40),
        scheduler=SchedulerSettings(max_num_seqs=8, max_num_batched_tokens=64),
    )
    await measure(settings, capfd, longest=400, count=12)


@pytest.mark.long
async def test_a_real_model_with_a_full_pool_and_a_long_scored_prompt(capfd: pytest.CaptureFixture[str]) -> None:
    settings = EngineSettings(
        model=ModelSettings(model=str(smollm2_gguf()), device="cpu", threads=1),
        cache=CacheSettings(num_kv_blocks=300),
        scheduler=SchedulerSettings(max_num_seqs=16, max_num_batched_tokens=256),
    )
    classes = await measure(settings, capfd, longest=4000, count=40)
    write_evidence("engine_memory", {"seed": "none: fixed load", "model": "SmolLM2-135M", "bytes": classes})
