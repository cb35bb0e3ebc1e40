"""--quantization: a .gguf file in its own scales gives the numbers of the dequantised one; who cannot says so."""

import random
from pathlib import Path

import pytest
import torch

from pagefleet_kernels.cpu.program import CpuProgram
from pagefleet_server.model_errors import ModelError, ModelRefused
from pagefleet_server.models.executor import open_model
from pagefleet_server.models.fused.decoder import FusedDecoder
from pagefleet_server.runner.runner import Runner, build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from support.gguf_llama_file import tiny_llama_gguf
from support.stepping import Blocks, chunked_logits, quiet
from support.tiny_models import write_tiny

KINDS = ["Q4_1", "Q4_0", "Q8_0", "Q5_0", "Q5_1"]


def runner_for(path: Path, quantization: str, dtype: str = "float32") -> Runner:
    model = ModelSettings(model=str(path), device="cpu", dtype=dtype, threads=1, quantization=quantization)
    return build_runner(
        EngineSettings(
            model=model,
            cache=CacheSettings(num_kv_blocks=64),
            scheduler=SchedulerSettings(max_num_batched_tokens=64),
        ),
        quiet,
    )


def logits(runner: Runner, seed: int) -> list[torch.Tensor]:
    """Of three prompts in chunks that `seed` mixes."""
    tokens, mixture = random.Random(5), random.Random(seed)
    prompts = [[tokens.randrange(3, runner.vocab_size) for _ in range(length)] for length in (3, 16, 50)]
    blocks = Blocks(runner, mixture)
    sequences = [blocks.sequence(str(index), prompt) for index, prompt in enumerate(prompts)]
    got = chunked_logits(runner, sequences, mixture)
    return [got[str(index)] for index in range(len(sequences))]


def distance(found: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """The largest difference, in the spread of what is wanted."""
    return float((torch.cat(found) - torch.cat(want)).abs().max() / torch.cat(want).std())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_files_own_scales_give_the_logits_of_the_dequantised_file(tmp_path: Path, kind: str, tied: bool) -> None:
    path, _ = tiny_llama_gguf(tmp_path / "m.gguf", tied=tied, kind=kind)
    whole, own = runner_for(path, "none"), runner_for(path, "gguf")
    assert own.model.executor == "fused"
    assert own.model.num_weight_bytes < 0.6 * whole.model.num_weight_bytes
    assert distance(logits(own, 1), logits(whole, 1)) < 1e-4
    # As one call of the library, not as torch ops around its linears.
    assert isinstance(own.model, FusedDecoder)
    assert own.model._recorded is not None and isinstance(own.model._recorded.program, CpuProgram)


@pytest.mark.parametrize("form", ["gguf", "q8_0", "q4_1"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_the_same_in_any_mixture(tmp_path: Path, form: str, dtype: str) -> None:
    path, _ = tiny_llama_gguf(tmp_path / "m.gguf", tied=True, kind="Q4_1")
    runner = runner_for(path, form, dtype)
    first = logits(runner, 1)
    for seed in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(logits(runner, seed), first, strict=True))


def test_a_file_without_scales_is_served_as_it_is(tmp_path: Path) -> None:
    path, _ = tiny_llama_gguf(tmp_path / "m.gguf", tied=False, kind="F16")
    assert distance(logits(runner_for(path, "gguf"), 1), logits(runner_for(path, "none"), 1)) == 0.0


def test_a_checkpoint_rounded_at_load_is_near_and_nearer_with_more_bits(tmp_path: Path) -> None:
    """Merged weights with biases: what the rounding costs, not what a mistake costs."""
    path = write_tiny(tmp_path, "qwen2", hidden_size=64, intermediate_size=96)
    want = logits(runner_for(path, "none"), 1)
    eight, four = (distance(logits(runner_for(path, form), 1), want) for form in ("q8_0", "q4_1"))
    assert 0.0 < eight < 0.3
    assert 2.0 * eight < four


def refusal(path: Path, **settings: object) -> str:
    with pytest.raises((ModelError, ModelRefused)) as caught:
        open_model(ModelSettings(model=str(path), device="cpu", **settings)).load(  # type: ignore[arg-type]
            runner_for(path, "none").backend
        )
    return str(caught.value)


def test_what_cannot_be_served_so_is_refused_with_the_reason(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path, "llama")
    assert "only the fused decoder" in refusal(directory, quantization="gguf", executor="transformers")
    assert "keeps the scales of a .gguf file" in refusal(directory, quantization="gguf")
    assert "expected none, gguf, q8_0 or q4_1" in refusal(directory, quantization="q3")
    path, _ = tiny_llama_gguf(tmp_path / "m.gguf", tied=True, kind="Q4_1")
    assert "do not multiply torch.float16" in refusal(path, quantization="gguf", dtype="float16")
