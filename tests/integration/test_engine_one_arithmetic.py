"""The same request gets the same tokens and the same logprob bits whatever the scheduler does to it, on CPU."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from pagefleet_server.core.limits import SchedulerLimits
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.scheduler import Scheduler
from pagefleet_server.core.step import TokenLogprobs
from pagefleet_server.model_errors import ModelError
from pagefleet_server.runner.runner import Runner, build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from support.evidence import write_evidence
from support.smollm2 import smollm2_gguf
from support.stepping import quiet
from support.tiny_models import write_tiny_llama

BLOCK_SIZE = 16
NUM_BLOCKS = 120
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 47, 64, 70)
NUM_NEW_TOKENS = 20


@dataclass
class Trace:
    """What one request got: bits, not approximations."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True)
class Wish:
    prompt: list[int]
    sampling: SamplingParams


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    path: Path = write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=3)
    return runner_for(path, request.param)


def runner_for(path: Path, dtype: str, *, threads: int = 1, num_blocks: int = NUM_BLOCKS) -> Runner:
    settings = EngineSettings(
        model=ModelSettings(model=str(path), device="cpu", dtype=dtype, threads=threads),
        cache=CacheSettings(block_size=BLOCK_SIZE, num_kv_blocks=num_blocks),
        scheduler=SchedulerSettings(max_num_batched_tokens=256),
    )
    return build_runner(settings, quiet)


def wishes(lengths: Sequence[int] = LENGTHS, num_new: int = NUM_NEW_TOKENS, seed: int = 5) -> list[Wish]:
    """Greedy and drawn requests of awkward lengths; they share prefixes."""
    rng = random.Random(seed)
    base = [rng.randrange(3, 320) for _ in range(max(lengths))]
    return [
        Wish(
            [*base[: length - 1], rng.randrange(3, 320)],
            SamplingParams(
                max_tokens=num_new,
                temperature=0.0 if index % 2 else 0.9,
                seed=index,
                logprobs=3,
                frequency_penalty=0.2 if index % 3 == 0 else 0.0,
            ),
        )
        for index, length in enumerate(lengths)
    ]


@dataclass
class Played:
    traces: list[Trace]
    num_preemptions: int
    num_chunks: int
    hits_tokens: int
    num_copies: int = 0
    most_at_once: int = 0


def play(
    runner: Runner,
    groups: list[list[Wish]],
    *,
    num_blocks: int = NUM_BLOCKS,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 256,
    prefix_caching: bool = False,
) -> Played:
    scheduler = Scheduler(
        SchedulerLimits(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=num_blocks * BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        ),
        prefix_caching=prefix_caching,
    )
    traces: dict[str, Trace] = {}
    for group in groups:
        ids = [str(len(traces) + index) for index in range(len(group))]
        traces |= {request_id: Trace() for request_id in ids}
        scheduler.add_group(ids, group[0].prompt, [wish.sampling for wish in group], arrival_time=0.0)
    num_chunks = num_copies = most_at_once = 0
    while (output := scheduler.schedule(0.0)) is not None:
        num_chunks += sum(not row.sample for row in output.scheduled)
        num_copies += len(output.copies)
        most_at_once = max(most_at_once, len(output.scheduled))
        for new in scheduler.update(output, runner.execute(output)):
            assert new.logprobs is not None
            traces[new.request_id].token_ids += new.token_ids
            traces[new.request_id].logprobs += new.logprobs
        scheduler.check_integrity()
    counts = scheduler.counts()
    assert counts.blocks_used == 0
    return Played(
        list(traces.values()), counts.num_preemptions, num_chunks, counts.prefix_hits_tokens, num_copies, most_at_once
    )


@pytest.fixture(scope="module")
def alone(runner: Runner) -> list[Trace]:
    return play(runner, [[wish] for wish in wishes()], max_num_seqs=1).traces


def test_in_one_batch(runner: Runner, alone: list[Trace]) -> None:
    assert play(runner, [[wish] for wish in wishes()]).traces == alone


@pytest.mark.parametrize("budget", [4, 17, 33])
def test_with_any_chunk_size(runner: Runner, alone: list[Trace], budget: int) -> None:
    played = play(runner, [[wish] for wish in wishes()], max_num_seqs=4, max_num_batched_tokens=budget)
    assert played.num_chunks > 0
    assert played.traces == alone


def test_after_preemption(runner: Runner, alone: list[Trace]) -> None:
    played = play(runner, [[wish] for wish in [*wishes(), *wishes()]], num_blocks=9)
    assert played.num_preemptions >= 3
    assert played.traces == alone * 2


def test_on_a_cache_hit(runner: Runner, alone: list[Trace]) -> None:
    """Hits of the step itself, of earlier steps, and (second half) of whole earlier conversations."""
    played = play(runner, [[wish] for wish in [*wishes(), *wishes()]], max_num_seqs=5, prefix_caching=True)
    assert played.hits_tokens > 300
    assert played.traces == alone * 2


def test_in_a_fork(runner: Runner, alone: list[Trace]) -> None:
    """Each wish thrice in a group with other seeds: the first draw comes from a shared row, then blocks are copied."""
    groups = [[wish, *(Wish(wish.prompt, other.sampling) for other in wishes()[:2])] for wish in wishes()]
    apart = play(runner, [[wish] for group in groups for wish in group], max_num_seqs=1).traces
    played = play(runner, groups)
    assert played.num_copies >= 2 * 7
    assert played.traces == apart
    assert played.traces[::3] == alone


def test_the_flag_for_it_is_refused_where_it_would_not_hold(tmp_path: Path) -> None:
    model = ModelSettings(model=str(write_tiny_llama(tmp_path)), device="cpu", dtype="float32", deterministic=True)
    settings = EngineSettings(model=model, cache=CacheSettings(num_kv_blocks=40))
    assert build_runner(settings, quiet).linear_backend == "cpu"
    settings = replace(settings, model=replace(model, attention_backend="reference"))
    with pytest.raises(ModelError, match="--deterministic: on cpu with attention by 'reference'"):
        build_runner(settings, quiet)


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_model_gives_the_same_bits_whatever_happens(dtype: str, threads: int) -> None:
    """SmolLM2: alone; in a batch of 64; in chunks of every size; after preemption; on cache hits; in forks."""
    seed, num_blocks = 17, 700
    runner = runner_for(smollm2_gguf(), dtype, threads=threads, num_blocks=num_blocks)
    many = wishes([*(1 + 7 * index % 61 for index in range(63)), 300], num_new=5, seed=seed)
    alone = play(runner, [[wish] for wish in many], num_blocks=num_blocks, max_num_seqs=1).traces
    batch = play(runner, [[wish] for wish in many], num_blocks=num_blocks, max_num_seqs=64, max_num_batched_tokens=4096)
    assert batch.traces == alone
    assert batch.most_at_once == 64
    for budget in (5, 23, 64):
        chunked = play(
            runner,
            [[wish] for wish in many[-12:]],
            num_blocks=num_blocks,
            max_num_seqs=5,
            max_num_batched_tokens=budget,
        )
        assert chunked.num_chunks > 0
        assert chunked.traces == alone[-12:]
    preempted = play(runner, [[wish] for wish in many], num_blocks=22, max_num_seqs=16)
    assert preempted.num_preemptions >= 1
    assert preempted.traces == alone
    hit = play(runner, [[wish] for wish in [*many, *many]], num_blocks=num_blocks, max_num_seqs=16, prefix_caching=True)
    assert hit.hits_tokens > 1000
    assert hit.traces == alone * 2
    groups = [[wish, *(Wish(wish.prompt, other.sampling) for other in many[:2])] for wish in many[-12:]]
    forked = play(runner, groups, num_blocks=num_blocks)
    assert forked.num_copies > 10
    assert forked.traces[::3] == alone[-12:]
    facts = {"seed": seed, "model": "SmolLM2-135M", "dtype": dtype, "threads": threads, "requests": len(many)}
    what = {"batch": 64, "preemptions": preempted.num_preemptions, "hit_tokens": hit.hits_tokens, "different_bits": 0}
    write_evidence(f"batch_invariance_{dtype}_{threads}_threads", facts | what)


def test_scores_of_a_prompt_are_those_of_the_model_whatever_the_chunks(runner: Runner) -> None:
    """Each prompt token's log-probability equals the one of drawing it: the logits of a prompt that ends before it."""
    prompt = wishes()[-1].prompt
    score = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=3)
    want = []
    for end in range(1, len(prompt)):
        only = SamplingParams(max_tokens=1, temperature=0.0, logprobs=3, allowed_token_ids=(prompt[end],))
        (trace,) = play(runner, [[Wish(prompt[:end], only)]]).traces
        want += trace.logprobs
    for budget in (7, 33, 256):
        assert play_scores(runner, prompt, score, budget) == want


def play_scores(runner: Runner, prompt: list[int], sampling: SamplingParams, budget: int) -> list[TokenLogprobs]:
    limits = SchedulerLimits(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
    )
    scheduler = Scheduler(limits)
    scheduler.add("scored", prompt, sampling, arrival_time=0.0)
    scheduler.add("beside", prompt[5:], SamplingParams(max_tokens=20), arrival_time=0.0)
    scores: list[TokenLogprobs] = []
    while (output := scheduler.schedule(0.0)) is not None:
        for new in scheduler.update(output, runner.execute(output)):
            scores += new.prompt_logprobs or []
    return scores
