"""The fused decoder against transformers: layer by layer, logits of chunked mixtures, greedy tokens, bits."""

import dataclasses
import logging
import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from pagefleet_kernels.dispatch import select_backend
from pagefleet_server.models.fused.decoder import FusedDecoder
from pagefleet_server.runner.flat_batch import flatten
from pagefleet_server.runner.kv_memory import allocate_kv
from pagefleet_server.runner.paged_context import PagedContext
from pagefleet_server.runner.runner import Runner, build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from support.fused_cases import FUSED_CASES
from support.stepping import Blocks, chunked_logits, quiet, step_of
from support.tiny_models import eager, eager_logits, write_tiny

LENGTHS = (3, 16, 50)
NEW_TOKENS = 12


def runner_for(path: Path, *, executor: str = "fused", dtype: str = "float32") -> Runner:
    settings = EngineSettings(
        model=ModelSettings(model=str(path), device="cpu", dtype=dtype, threads=1, executor=executor),
        cache=CacheSettings(num_kv_blocks=64),
        scheduler=SchedulerSettings(max_num_batched_tokens=64),
    )
    return build_runner(settings, quiet)


def on_backend(runner: Runner, name: str) -> Runner:
    """The same weights, another backend's attention and ops."""
    model = runner.model
    backend = select_backend(model.device, name)
    caches = allocate_kv(model.layers, runner.plan, backend=backend, dtype=model.dtype, device=model.device)
    return dataclasses.replace(runner, backend=backend, caches=caches)


def test_a_shallow_decoder_has_one_layer_of_each_kind(tmp_path: Path) -> None:
    """The largest step is measured on it: every kind must take part, and none twice."""
    pattern = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    changes = {"num_hidden_layers": len(pattern), "layer_types": pattern}
    model = runner_for(write_tiny(tmp_path, "gemma3_text", **changes)).model
    assert isinstance(model, FusedDecoder)
    kept = model.shallow()
    assert [layer.sliding_window is None for layer in kept.layers] == [False, True]
    assert kept.weights.layers == (model.weights.layers[0], model.weights.layers[2])
    assert len(model.layers) == len(pattern)


def prompts(runner: Runner, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, runner.vocab_size) for _ in range(length)] for length in lengths]


def mixed_logits(runner: Runner, seed: int) -> list[torch.Tensor]:
    rng = random.Random(seed)
    blocks = Blocks(runner, rng)
    sequences = [blocks.sequence(str(index), tokens) for index, tokens in enumerate(prompts(runner))]
    got = chunked_logits(runner, sequences, rng)
    return [got[str(index)] for index in range(len(sequences))]


def greedy(runner: Runner, prompt: list[int]) -> list[int]:
    sequence = Blocks(runner, random.Random(0)).sequence("s", prompt, room=NEW_TOKENS)
    for _ in range(NEW_TOKENS):
        count = len(sequence.token_ids) - sequence.computed
        sequence.token_ids.append(runner.execute(step_of([(sequence, count)])).sampled["s"])
    return sequence.token_ids[len(prompt) :]


def generate(module: Any, prompt: list[int]) -> list[int]:
    out = module.generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return cast(list[int], out[0, len(prompt) :].tolist())


@torch.inference_mode()
def states_after(runner: Runner, num_layers: int, prompt: list[int]) -> torch.Tensor:
    """[T, H] after the first layers, normed as after the last."""
    decoder = runner.model
    assert isinstance(decoder, FusedDecoder)
    short = dataclasses.replace(
        decoder,
        spec=dataclasses.replace(decoder.spec, layers=decoder.spec.layers[:num_layers]),
        weights=dataclasses.replace(decoder.weights, layers=decoder.weights.layers[:num_layers]),
        _recorded=None,
    )
    step = step_of([(Blocks(runner, random.Random(0)).sequence("s", prompt), len(prompt))])
    batch = flatten(step, block_size=runner.block_size, device=decoder.device)
    context = PagedContext(runner.backend, runner.caches[:num_layers], batch.attention)
    return short.hidden(batch.token_ids, batch.positions, context).clone()


@pytest.mark.parametrize("case", sorted(FUSED_CASES))
def test_a_family_equals_transformers(tmp_path: Path, case: str) -> None:
    """Each layer's states, the logits of random mixtures on both kinds of program, and greedy tokens."""
    model_type, changes = FUSED_CASES[case]
    path = write_tiny(tmp_path, model_type, **changes)
    runner = runner_for(path)
    assert runner.model.executor == "fused"
    oracle: Any = eager(path)
    texts = prompts(runner)
    want = [eager_logits(oracle, tokens) for tokens in texts]
    with torch.inference_mode():
        states = oracle.model(torch.tensor([texts[2]]), output_hidden_states=True, use_cache=False).hidden_states
        layers = [oracle.model.norm(state[0]) for state in states[1:-1]] + [states[-1][0]]
    for index, layer in enumerate(layers):
        error = float((states_after(runner, index + 1, texts[2]) - layer).abs().max())
        assert error <= 2e-5 * float(layer.abs().max()), f"layer {index}"
    for own in (runner, on_backend(runner, "reference")):
        for got, logits in zip(mixed_logits(own, seed=1), want, strict=True):
            assert float((got - logits).abs().max()) <= 1e-4
    assert [greedy(runner, tokens) for tokens in texts] == [generate(oracle, tokens) for tokens in texts]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", sorted(FUSED_CASES))
def test_a_family_gives_the_same_bits_in_any_mixture(tmp_path: Path, case: str, dtype: str) -> None:
    model_type, changes = FUSED_CASES[case]
    runner = runner_for(write_tiny(tmp_path, model_type, **changes), dtype=dtype)
    first = mixed_logits(runner, seed=1)
    for seed in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(mixed_logits(runner, seed), first, strict=True))


def test_bfloat16_is_as_near_to_float32_as_the_transformers_path(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "gemma2")
    exact = torch.cat([eager_logits(eager(path), tokens) for tokens in prompts(runner_for(path))])

    def distance(executor: str) -> float:
        got = torch.cat(mixed_logits(runner_for(path, executor=executor, dtype="bfloat16"), seed=1))
        return float((got - exact).square().mean().sqrt())

    assert distance("fused") <= 1.2 * distance("transformers")


def test_steps_larger_than_all_before(tmp_path: Path) -> None:
    """The program's buffers grow; what was computed before stays."""
    runner = runner_for(write_tiny(tmp_path, "llama"))
    alone = mixed_logits(runner, seed=1)
    sequence = Blocks(runner, random.Random(0)).sequence("s", prompts(runner, (200,))[0])
    assert runner.execute(step_of([(sequence, 200)])).sampled
    assert all(torch.equal(a, b) for a, b in zip(mixed_logits(runner, seed=2), alone, strict=True))


def test_a_width_that_the_library_does_not_hold_runs_as_torch(tmp_path: Path) -> None:
    """An odd number of inputs in bfloat16: the linear is not the library's own, and so the step is no call of it."""
    path = write_tiny(tmp_path, "llama", intermediate_size=49)
    exact = torch.cat([eager_logits(eager(path), tokens) for tokens in prompts(runner_for(path))])
    got = torch.cat(mixed_logits(runner_for(path, dtype="bfloat16"), seed=1))
    assert float((got - exact).square().mean().sqrt()) <= 0.05 * float(exact.square().mean().sqrt())


def test_the_log_says_which_executor_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fused, other = write_tiny(tmp_path / "a", "llama"), write_tiny(tmp_path / "b", "mixtral")
    with caplog.at_level(logging.INFO):
        assert runner_for(fused, executor="auto").model.executor == "fused"
        assert runner_for(fused, executor="transformers").model.executor == "transformers"
        assert runner_for(other, executor="auto").model.executor == "transformers"
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("executor ")]
    assert lines == [
        "executor fused: llama is in its table",
        "executor transformers: --executor transformers asks for it",
        "executor transformers: the fused decoder does not serve it: mixtral is not in its table",
    ]
