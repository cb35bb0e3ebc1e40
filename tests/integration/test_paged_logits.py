"""Paged, chunked, mixed batches against transformers' own eager attention."""

import dataclasses
import random
from pathlib import Path

import pytest

from pagefleet_kernels.dispatch import select_backend
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.models.loading import load_model
from pagefleet_server.runner.kv_memory import allocate_kv
from pagefleet_server.runner.runner import Runner, build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from support.smollm2 import smollm2_gguf
from support.stepping import Blocks, chunked_logits, quiet, step_of
from support.tiny_models import ARCHITECTURES, eager, eager_logits, write_tiny, write_tiny_llama


def runner_for(
    path: Path, *, dtype: str = "float32", num_kv_blocks: int = 64, executor: str = "transformers"
) -> Runner:
    settings = EngineSettings(
        model=ModelSettings(model=str(path), device="cpu", dtype=dtype, threads=1, executor=executor),
        cache=CacheSettings(num_kv_blocks=num_kv_blocks),
        scheduler=SchedulerSettings(max_num_batched_tokens=64),
    )
    return build_runner(settings, quiet)


def on_backend(runner: Runner, name: str) -> Runner:
    model = runner.model
    backend = select_backend(model.device, name)
    caches = allocate_kv(model.layers, runner.plan, backend=backend, dtype=model.dtype, device=model.device)
    return dataclasses.replace(runner, backend=backend, caches=caches)


def worst_error(runner: Runner, path: Path, lengths: list[int], *, seed: int = 0) -> float:
    rng = random.Random(seed)
    blocks = Blocks(runner, rng)
    sequences = [
        blocks.sequence(f"s{length}", [rng.randrange(runner.vocab_size) for _ in range(length)]) for length in lengths
    ]
    got = chunked_logits(runner, sequences, rng)
    oracle = eager(path)
    return max(float((got[s.name] - eager_logits(oracle, s.token_ids)).abs().max()) for s in sequences)


@pytest.mark.parametrize("executor", ["fused", "transformers"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_tiny_llama_chunked_and_mixed_equals_eager(tmp_path: Path, backend: str, executor: str) -> None:
    path = write_tiny_llama(tmp_path)
    runner = on_backend(runner_for(path, executor=executor), backend)
    assert worst_error(runner, path, [1, 15, 16, 17, 40, 90]) <= 1e-4


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_architecture_chunked_and_mixed_equals_eager(tmp_path: Path, model_type: str) -> None:
    path = write_tiny(tmp_path, model_type)
    assert worst_error(runner_for(path), path, [3, 16, 50], seed=1) <= 1e-4


@pytest.mark.parametrize("executor", ["fused", "transformers"])
def test_logits_of_sampled_rows_only(tmp_path: Path, executor: str) -> None:
    runner = runner_for(write_tiny_llama(tmp_path), executor=executor)
    blocks = Blocks(runner, random.Random(0))
    done, halfway = blocks.sequence("done", [5, 6, 7]), blocks.sequence("halfway", [8] * 20)
    step = step_of([(done, 3), (halfway, 10)])
    first, second = step.scheduled
    step = dataclasses.replace(step, scheduled=(first, dataclasses.replace(second, sample=False)))
    assert list(runner.execute(step).sampled) == ["done"]


@pytest.mark.parametrize("executor", ["fused", "transformers"])
def test_a_step_that_samples_nothing(tmp_path: Path, executor: str) -> None:
    runner = runner_for(write_tiny_llama(tmp_path), executor=executor)
    step = step_of([(Blocks(runner, random.Random(0)).sequence("s", [8] * 20), 10)])
    step = dataclasses.replace(step, scheduled=(dataclasses.replace(step.scheduled[0], sample=False),))
    assert runner.execute(step).sampled == {}


def test_seeded_draws_do_not_depend_on_neighbours(tmp_path: Path) -> None:
    runner = runner_for(write_tiny_llama(tmp_path))
    params = SamplingParams(max_tokens=1, temperature=1.0, seed=7)

    def first_token(companions: int) -> int:
        blocks = Blocks(runner, random.Random(companions))
        others = [blocks.sequence(f"o{i}", [i + 3] * (i + 1)) for i in range(companions)]
        own = blocks.sequence("own", [4, 9, 2, 11], sampling=params)
        step = step_of([(s, len(s.token_ids)) for s in [*others, own]])
        return runner.execute(step).sampled["own"]

    assert len({first_token(companions) for companions in (0, 1, 3, 7)}) == 1


@pytest.mark.parametrize("executor", ["fused", "transformers"])
def test_smollm2_in_float32_equals_eager(executor: str) -> None:
    """Weights read apart for each side; random tokens, whose logits reach 35, chunked and mixed. Each side is about
    2e-6 of that range away from float64: other orders of additions in 30 layers."""
    path = smollm2_gguf()
    runner = runner_for(path, executor=executor)
    rng = random.Random(3)
    blocks = Blocks(runner, rng)
    sequences = [blocks.sequence(f"s{n}", [rng.randrange(17, 49152) for _ in range(n)]) for n in (1, 16, 17, 45)]
    got = chunked_logits(runner, sequences, rng)
    module = load_model(ModelSettings(model=str(path), device="cpu", dtype="float32")).module
    module.set_attn_implementation("eager")
    for sequence in sequences:
        want = eager_logits(module, sequence.token_ids)
        assert float((got[sequence.name] - want).abs().max()) <= 5e-6 * float(want.abs().max())
