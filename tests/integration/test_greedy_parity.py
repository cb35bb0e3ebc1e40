"""Greedy output of scheduler and runner equals transformers' generate, token for token, in float32, on a real model."""

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagefleet_server.core.limits import SchedulerLimits
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.scheduler import Scheduler
from pagefleet_server.core.step import SchedulerOutput
from pagefleet_server.models.loading import load_model
from pagefleet_server.runner.runner import Runner, build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from pagefleet_server.tokenizer import load_tokenizer
from support.evidence import write_evidence
from support.smollm2 import smollm2_gguf
from support.stepping import quiet

BLOCK_SIZE = 16
NUM_BLOCKS = 96
LENGTHS = (1, 2, 3, 5, 7, 9, 12, 15, 16, 17, 20, 24, 31, 32, 33, 40, 48, 49, 65, 97)
TEXT = """The lighthouse keeper had counted 1,204 ships since the winter began, and he wrote each of them into a
ledger whose pages smelled of salt. On the morning of the third of March he saw one that he could not name. It carried
no flag, it made no smoke, and it stood quite still where the current runs fastest. He lit the lamp, though the sun was
up, and waited for an answer. `def wait(seconds): return seconds + 1` was all that the radio said, in a calm voice."""


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    want: list[int]


@dataclass(frozen=True)
class Run:
    tokens: list[list[int]]
    steps: list[SchedulerOutput]
    num_preemptions: int


@pytest.fixture(scope="module")
def oracle() -> Any:
    """transformers' own module, linears, eager attention and cache, over weights that were read for it alone (the
    runner packs its own and lets them go)."""
    weights = load_model(ModelSettings(model=str(smollm2_gguf()), dtype="float32", device="cpu")).module
    config = copy.deepcopy(weights.config)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32, attn_implementation="eager"
        )
    model.load_state_dict(weights.state_dict(), assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.eval()
    assert model.config._attn_implementation == "eager"
    return model


def case_of(oracle: Any, prompt: list[int], num_new: int) -> Case:
    """A prompt with what transformers generates from it."""
    inputs = torch.tensor([prompt])
    with torch.inference_mode():
        output = oracle.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            pad_token_id=0,
        )
    return Case(prompt, output[0, len(prompt) :].tolist())


@pytest.fixture(scope="module")
def text_ids() -> list[int]:
    return load_tokenizer(smollm2_gguf()).tokenizer.encode(TEXT, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def cases(oracle: Any, text_ids: list[int]) -> list[Case]:
    """20 prompts, each cut from another place of the text."""
    cases = []
    for index, length in enumerate(LENGTHS):
        start = index * 3 % max(1, len(text_ids) - length)
        prompt = text_ids[start : start + length]
        assert len(prompt) == length
        cases.append(case_of(oracle, prompt, num_new_tokens(length)))
    return cases


@pytest.fixture(scope="module", params=["fused", pytest.param("transformers", marks=pytest.mark.long)])
def runner(request: pytest.FixtureRequest) -> Runner:
    settings = EngineSettings(
        model=ModelSettings(
            model=str(smollm2_gguf()), dtype="float32", device="cpu", threads=1, executor=request.param
        ),
        cache=CacheSettings(block_size=BLOCK_SIZE, num_kv_blocks=NUM_BLOCKS),
        scheduler=SchedulerSettings(max_num_seqs=20, max_num_batched_tokens=512),
    )
    return build_runner(settings, quiet)


def num_new_tokens(prompt_length: int) -> int:
    """Short prompts grow beyond their block, so that blocks run out; long ones cost too much."""
    return 14 if prompt_length < 20 else 4


def run(
    runner: Runner,
    cases: list[Case],
    *,
    num_blocks: int = NUM_BLOCKS,
    max_num_seqs: int = 20,
    max_num_batched_tokens: int = 512,
    prefix_caching: bool = False,
) -> Run:
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
    for index, case in enumerate(cases):
        sampling = SamplingParams(max_tokens=len(case.want), temperature=0.0)
        scheduler.add(str(index), case.prompt, sampling, arrival_time=0.0)
    tokens: list[list[int]] = [[] for _ in cases]
    steps: list[SchedulerOutput] = []
    while (output := scheduler.schedule(float(len(steps)))) is not None:
        steps.append(output)
        for new in scheduler.update(output, runner.execute(output)):
            tokens[int(new.request_id)] += new.token_ids
        scheduler.check_integrity()
    counts = scheduler.counts()
    assert counts.blocks_used == 0
    return Run(tokens, steps, counts.num_preemptions)


def test_each_request_alone(runner: Runner, cases: list[Case]) -> None:
    result = run(runner, cases, max_num_seqs=1)
    assert all(len(step.scheduled) == 1 for step in result.steps)
    assert result.tokens == [case.want for case in cases]


def test_all_in_one_mixed_batch(runner: Runner, cases: list[Case]) -> None:
    result = run(runner, cases, max_num_batched_tokens=160)
    assert any(0 < step.num_decodes < len(step.scheduled) for step in result.steps), "no step mixed decodes and prompts"
    assert max(len(step.scheduled) for step in result.steps) == 20
    assert result.tokens == [case.want for case in cases]


def test_prompts_in_small_chunks(runner: Runner, cases: list[Case]) -> None:
    result = run(runner, cases, max_num_seqs=4, max_num_batched_tokens=13)
    chunks = [row for step in result.steps for row in step.scheduled if not row.sample]
    assert len(chunks) >= 20, "prompts were not cut"
    assert any(row.start % BLOCK_SIZE for row in chunks), "every cut was at a block boundary"
    assert result.tokens == [case.want for case in cases]


def test_with_forced_preemption(runner: Runner, cases: list[Case]) -> None:
    result = run(runner, cases, num_blocks=10, max_num_seqs=12)
    assert result.num_preemptions >= 3
    assert any(row.start == 0 and len(row.token_ids) not in LENGTHS for step in result.steps for row in step.scheduled)
    assert result.tokens == [case.want for case in cases]


def test_with_a_prefix_cache_that_is_hit(runner: Runner, cases: list[Case]) -> None:
    """Twice the same prompts: most hits fall into the very step that writes the blocks, the others into later ones."""
    some = cases[-10:]
    result = run(runner, some * 2, max_num_batched_tokens=256, prefix_caching=True)
    rows = [row for step in result.steps for row in step.scheduled if int(row.request_id) >= len(some)]
    first = {row.request_id: row for row in reversed(rows)}
    want = [(len(case.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for case in some]
    assert [first[str(index + len(some))].start for index in range(len(some))] == want
    assert result.tokens == [case.want for case in some] * 2


@pytest.mark.long
def test_two_hundred_prompts_under_everything_at_once(runner: Runner, oracle: Any, text_ids: list[int]) -> None:
    """Random cuts of the text, some with words swapped, in small chunks, with preemption and a prefix cache."""
    seed = 11
    rng = random.Random(seed)
    many = []
    for _ in range(200):
        length = rng.randint(1, 90)
        start = rng.randrange(len(text_ids) - length)
        prompt = text_ids[start : start + length]
        if length > 4 and rng.random() < 0.5:
            prompt[rng.randrange(length)] = rng.choice(text_ids)
        many.append(case_of(oracle, prompt, rng.randint(4, 12)))
    result = run(runner, many, num_blocks=24, max_num_seqs=12, max_num_batched_tokens=48, prefix_caching=True)
    assert result.num_preemptions >= 1
    wrong = [index for index, case in enumerate(many) if result.tokens[index] != case.want]
    assert wrong == []
    num_tokens = sum(len(tokens) for tokens in result.tokens)
    facts = {"seed": seed, "model": "SmolLM2-135M", "dtype": "float32", "prompts": len(many), "tokens": num_tokens}
    write_evidence("greedy_parity", {**facts, "preemptions": result.num_preemptions, "different": len(wrong)})
