"""One row, one arithmetic: logits of a request have the same bits alone, in a batch, and for any chunk size.

Recompute after preemption is a chunk that holds generated tokens, and a prefix-cache hit is a chunk that starts late:
both are among the cuts below.
"""

import random
from pathlib import Path

import pytest
import torch

from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import TokenLogprobs
from pagefleet_server.runner.runner import Runner, build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from support.smollm2 import smollm2_gguf
from support.stepping import Blocks, KnownSequence, chunked_logits, quiet, step_of
from support.tiny_models import write_tiny_llama

LENGTHS = (1, 2, 15, 16, 17, 33, 70)


def runner_for(path: Path, dtype: str, threads: int = 1, executor: str = "fused") -> Runner:
    settings = EngineSettings(
        model=ModelSettings(model=str(path), device="cpu", dtype=dtype, threads=threads, executor=executor),
        cache=CacheSettings(num_kv_blocks=400),
        scheduler=SchedulerSettings(max_num_batched_tokens=64),
    )
    return build_runner(settings, quiet)


def prompts(runner: Runner, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(runner.vocab_size) for _ in range(length)] for length in lengths]


def logits_by(runner: Runner, lengths: tuple[int, ...], seed: int | None) -> list[torch.Tensor]:
    """Every row's logits of every prompt: each on its own in one chunk (None), or in a random mixture of chunks."""
    rng = random.Random(seed)
    blocks = Blocks(runner, rng)
    sequences = [blocks.sequence(str(i), tokens) for i, tokens in enumerate(prompts(runner, lengths))]
    if seed is not None:
        got = chunked_logits(runner, sequences, rng)
    else:
        got = {}
        for sequence in sequences:
            got |= chunked_logits(runner, [sequence], WholeChunks())
    return [got[str(i)] for i in range(len(sequences))]


class WholeChunks(random.Random):
    """Chooses the longest chunk that chunked_logits offers."""

    def choice(self, seq: object) -> int:  # type: ignore[override]
        return 10**9


def assert_same_bits(got: list[torch.Tensor], want: list[torch.Tensor], lengths: tuple[int, ...]) -> None:
    for length, a, b in zip(lengths, got, want, strict=True):
        rows = (a != b).any(dim=1).nonzero().flatten().tolist()
        assert rows == [], f"prompt of {length}: rows {rows} differ by up to {float((a - b).abs().max())}"


@pytest.mark.parametrize("executor", ["fused", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiny_llama_gives_the_same_bits_in_any_mixture(tmp_path: Path, dtype: str, executor: str) -> None:
    runner = runner_for(write_tiny_llama(tmp_path), dtype, executor=executor)
    alone = logits_by(runner, LENGTHS, None)
    for seed in range(8):
        assert_same_bits(logits_by(runner, LENGTHS, seed), alone, LENGTHS)


@pytest.mark.parametrize(
    ("dtype", "executor"), [("float32", "fused"), ("bfloat16", "fused"), ("bfloat16", "transformers")]
)
def test_smollm2_gives_the_same_bits_in_any_mixture(dtype: str, executor: str) -> None:
    runner = runner_for(smollm2_gguf(), dtype, executor=executor)
    lengths = (1, 16, 17, 40)
    alone = logits_by(runner, lengths, None)
    for seed in range(2):
        assert_same_bits(logits_by(runner, lengths, seed), alone, lengths)


@pytest.mark.long
@pytest.mark.parametrize("executor", ["fused", "transformers"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_gives_the_same_bits_in_a_batch_of_64(dtype: str, threads: int, executor: str) -> None:
    runner = runner_for(smollm2_gguf(), dtype, threads, executor)
    lengths = (*(1 + 7 * index % 47 for index in range(63)), 300)
    assert_same_bits(logits_by(runner, lengths, 0), logits_by(runner, lengths, None), lengths)


@pytest.mark.parametrize("executor", ["fused", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampled_tokens_and_logprobs_are_the_same_alone_and_in_a_batch(
    tmp_path: Path, dtype: str, executor: str
) -> None:
    runner = runner_for(write_tiny_llama(tmp_path), dtype, executor=executor)

    def generate(num_others: int) -> list[tuple[int, TokenLogprobs]]:
        """Ten tokens of the first request beside others that come and go."""
        blocks = Blocks(runner, random.Random(num_others))
        params = SamplingParams(max_tokens=99, temperature=0.9, top_p=0.95, seed=5, logprobs=4)
        own = blocks.sequence("own", [3, 1, 4, 1, 5, 9, 2, 6], room=20, sampling=params)
        others: list[KnownSequence] = []
        out: list[tuple[int, TokenLogprobs]] = []
        for turn in range(10):
            if turn % 3 == 0:
                others = [blocks.sequence(f"{turn}.{i}", [i + 3] * (3 * i + 4)) for i in range(num_others)]
            chunks = [(own, len(own.token_ids) - own.computed)]
            chunks += [(o, min(1 + turn % 3, len(o.token_ids) - o.computed)) for o in others]
            result = runner.execute(step_of([(s, count) for s, count in chunks if count > 0]))
            out.append((result.sampled["own"], result.logprobs["own"]))
            own.token_ids.append(out[-1][0])
        return out

    alone = generate(0)
    assert len({token for token, _ in alone}) > 3
    for num_others in (1, 5, 12):
        assert generate(num_others) == alone
