"""Guessed tokens change nothing but the number of steps: tokens and log-probabilities are the same bits."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from llguidance import LLMatcher

from pagefleet_server.core.limits import SchedulerLimits
from pagefleet_server.core.prompt_lookup import SpeculationLimits
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.scheduler import Scheduler
from pagefleet_server.core.step import TokenLogprobs
from pagefleet_server.runner.runner import Runner, build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from pagefleet_server.tokenizer import load_tokenizer
from support.evidence import write_evidence
from support.smollm2 import smollm2_gguf
from support.stepping import quiet
from support.tiny_models import write_tiny_llama

BLOCK_SIZE = 16
NUM_BLOCKS = 200
MAX_NUM_SEQS = 4
SPECULATION = SpeculationLimits(num_tokens=7, min_ngram=1, max_ngram=3, max_num_seqs=4)
JSON_LIST = LLMatcher.grammar_from_lark('start: "[" item ("," item)* "]"\nitem: /"name": "[a-z]{2,6}"/')


@dataclass
class Trace:
    """What one request got: bits, not approximations."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str = ""


@dataclass(frozen=True)
class Wish:
    """Requests with one prompt."""

    prompt: list[int]
    samplings: list[SamplingParams]


@dataclass
class Played:
    traces: list[Trace]
    num_steps: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    num_preemptions: int = 0


def play(
    runner: Runner,
    wishes: Sequence[Wish],
    speculation: SpeculationLimits | None,
    *,
    num_blocks: int = NUM_BLOCKS,
) -> Played:
    scheduler = Scheduler(
        SchedulerLimits(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=num_blocks * BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=128,
            speculation=speculation,
        )
    )
    traces: dict[str, Trace] = {}
    name = "plain" if speculation is None else "guessed"  # a grammar's state is kept by request id
    played, left = Played([]), deque(wishes)
    while left or scheduler.has_work:
        counts = scheduler.counts()
        if left and counts.num_running + counts.num_waiting + len(left[0].samplings) <= MAX_NUM_SEQS:
            wish = left.popleft()
            ids = [f"{name}{len(traces) + index}" for index in range(len(wish.samplings))]
            traces |= {request_id: Trace() for request_id in ids}
            scheduler.add_group(ids, wish.prompt, wish.samplings, arrival_time=0.0)
        output = scheduler.schedule(0.0)
        assert output is not None
        played.num_steps += 1
        for new in scheduler.update(output, runner.execute(output)):
            trace = traces[new.request_id]
            trace.token_ids += new.token_ids
            trace.logprobs += new.logprobs or []
            trace.finish = trace.finish if new.finish_reason is None else new.finish_reason.value
        scheduler.check_integrity()
    counts = scheduler.counts()
    assert counts.blocks_used == 0
    played.traces = list(traces.values())
    played.num_preemptions = counts.num_preemptions
    played.num_accepted = sum(counts.num_accepted_by_place)
    played.num_rejected = counts.num_draft_tokens - played.num_accepted
    return played


def runner_for(path: Path, dtype: str, *, num_blocks: int = NUM_BLOCKS) -> Runner:
    settings = EngineSettings(
        model=ModelSettings(model=str(path), device="cpu", dtype=dtype, threads=1),
        cache=CacheSettings(block_size=BLOCK_SIZE, num_kv_blocks=num_blocks),
        scheduler=SchedulerSettings(max_num_batched_tokens=128),
    )
    return build_runner(settings, quiet)


def samplings(rng: random.Random, num_new: int, vocabulary: int) -> SamplingParams:
    """Any mix of what a request may ask for; few allowed tokens make even a random model repeat itself."""
    few = tuple(sorted(rng.sample(range(vocabulary), 3)))
    return SamplingParams(
        max_tokens=rng.randrange(1, num_new),
        temperature=rng.choice([0.0, 0.0, 0.3, 1.0]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 0, 20]),
        seed=rng.randrange(2**63),
        logprobs=rng.choice([None, 0, 3]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
        presence_penalty=rng.choice([0.0, 0.0, 0.3]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.1]),
        allowed_token_ids=rng.choice([None, None, few]),
        min_tokens=rng.choice([0, 3]),
        stop_token_ids=tuple(rng.sample(range(vocabulary), rng.choice([0, vocabulary // 160]))),
        bad_words=((rng.randrange(vocabulary), rng.randrange(vocabulary)),) if rng.random() < 0.2 else (),
        logit_bias=((rng.randrange(vocabulary), 2.0),) if rng.random() < 0.2 else (),
    )


def make_wishes(seed: int, count: int, *, vocabulary: int, num_new: int) -> list[Wish]:
    """Prompts that repeat themselves more or less, each with one to three outputs."""
    rng = random.Random(seed)
    wishes = []
    for _ in range(count):
        phrase = [rng.randrange(3, vocabulary) for _ in range(rng.randrange(1, 25))]
        prompt = phrase * rng.randrange(1, 5) + [rng.randrange(3, vocabulary) for _ in range(rng.randrange(4))]
        wishes.append(Wish(prompt, [samplings(rng, num_new, vocabulary) for _ in range(rng.choice([1, 1, 2, 3]))]))
    return wishes


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return runner_for(write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=3), request.param)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_bits_with_everything_mixed(tiny: Runner, seed: int) -> None:
    wishes = make_wishes(seed, 25, vocabulary=320, num_new=60)
    plain = play(tiny, wishes, None)
    guessed = play(tiny, wishes, SPECULATION)
    assert guessed.traces == plain.traces
    assert guessed.num_accepted > 50
    assert guessed.num_rejected > 50
    assert guessed.num_steps < plain.num_steps


def test_the_same_bits_when_memory_runs_out(tiny: Runner) -> None:
    wishes = make_wishes(5, 15, vocabulary=320, num_new=80)
    plain = play(tiny, wishes, None)
    guessed = play(tiny, wishes, SPECULATION, num_blocks=12)
    assert guessed.traces == plain.traces
    assert guessed.num_preemptions > 0
    assert guessed.num_accepted > 0


def test_a_prompt_that_was_said_before_is_the_same_from_the_cache(tiny: Runner) -> None:
    """Blocks that right guesses filled are found by the next turn of the conversation; wrong ones never."""
    first = make_wishes(7, 6, vocabulary=320, num_new=60)
    said = play(tiny, first, None).traces
    owners = [wish for wish in first for _ in wish.samplings]
    turns = [
        Wish([*owner.prompt, *trace.token_ids, 5], owner.samplings[:1])
        for owner, trace in zip(owners, said, strict=True)
    ]
    plain = play(tiny, [*first, *turns], None)
    guessed = play(tiny, [*first, *turns], SPECULATION)
    assert guessed.traces == plain.traces


def real_wishes(count: int, seed: int, num_new: int) -> list[Wish]:
    """Questions about a text, code, lists: of a real model's vocabulary. Every seventh must follow a grammar."""
    tokenizer = load_tokenizer(smollm2_gguf()).tokenizer
    rng = random.Random(seed)
    nouns = ["river", "engine", "garden", "letter", "planet", "window", "bridge", "market"]
    wishes = []
    for index in range(count):
        noun, other = rng.sample(nouns, 2)
        text = rng.choice(
            [
                f"The {noun} is near the {other}. The {other} is old. Repeat: The {noun} is near the",
                f"def get_{noun}(self):\n    return self.{noun}\n\ndef get_{other}(self):\n",
                f"1. {noun}\n2. {other}\n3. {noun}\n4. {other}\n5.",
                f"Once upon a time there was a {noun}",
            ]
        )
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        asked = samplings(rng, num_new, 49152)
        if index % 7 == 3:
            asked = SamplingParams(
                max_tokens=num_new, temperature=0.0, grammar=JSON_LIST, stop_token_ids=(2,), logprobs=1
            )
        wishes.append(Wish(prompt, [asked]))
    return wishes


def test_a_real_model_says_the_same() -> None:
    runner = runner_for(smollm2_gguf(), "bfloat16")
    wishes = real_wishes(10, seed=11, num_new=30)
    plain = play(runner, wishes, None)
    guessed = play(runner, wishes, SPECULATION)
    assert guessed.traces == plain.traces
    assert guessed.num_accepted > 10
    assert guessed.num_steps < plain.num_steps


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_model_says_the_same_on_two_hundred_prompts(dtype: str) -> None:
    seed = random.randrange(2**32)
    runner = runner_for(smollm2_gguf(), dtype)
    wishes = real_wishes(200, seed=seed, num_new=80)
    plain = play(runner, wishes, None)
    guessed = play(runner, wishes, SPECULATION)
    wrong = sum(one != other for one, other in zip(guessed.traces, plain.traces, strict=True))
    assert wrong == 0
    facts = {"seed": seed, "model": "SmolLM2-135M", "dtype": dtype, "requests": len(wishes), "different": wrong}
    steps = {"steps": guessed.num_steps, "steps_without": plain.num_steps}
    guesses = {"accepted_guesses": guessed.num_accepted, "wrong_guesses": guessed.num_rejected}
    write_evidence(f"speculation_{dtype}", facts | steps | guesses)
