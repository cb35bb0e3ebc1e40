"""Verified architectures through the real runner: kernels, packed linears, paged cache; small copies."""

import random
from pathlib import Path

import pytest
from transformers import AutoConfig

from pagefleet_server.models.packed_linears import PackedLinear
from pagefleet_server.models.paged_model import PagedModel
from pagefleet_server.models.self_test import build_small
from pagefleet_server.models.shrunken import shrink
from pagefleet_server.models.verification import shipped_table
from pagefleet_server.runner.runner import Runner, build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from support.stepping import Blocks, chunked_logits, quiet
from support.tiny_models import eager, eager_logits
from tools.survey_models import TYPICAL

LENGTHS = (3, 16, 75)
TRAITS = {
    "deepseek_v3": "K rows wider than V rows, experts in groups",
    "minicpm3": "the same, scaled",
    "gemma3n_text": "layers that share K and V, soft cap of the logits",
    "gemma4_text": "the same, and heads of two widths",
    "gpt2": "learned positions, no nn.Linear but the last",
    "opt": "learned positions with an offset",
    "granite": "scales of embeddings, attention, residuals and logits",
    "cohere2": "layers without RoPE beside windows, parallel block",
    "gpt_oss": "sinks, experts with biases",
    "qwen3_moe": "experts in some layers",
    "hunyuan_v1_moe": "a router that reads its weight",
    "gpt_bigcode": "one K/V head",
}


def serve(path: Path, model_type: str, number: int) -> Runner:
    """The runner of a small copy of the architecture's `number`-th typical configuration."""
    config = AutoConfig.for_model(model_type, **TYPICAL.get(model_type, ({},))[number])
    small = shrink(config)
    build_small(small).save_pretrained(path)
    small.save_pretrained(path)  # of a model of several parts the module has written the text part's alone
    settings = EngineSettings(
        model=ModelSettings(model=str(path), device="cpu", dtype="float32", threads=1, executor="transformers"),
        cache=CacheSettings(num_kv_blocks=32),
        scheduler=SchedulerSettings(max_num_batched_tokens=64),
    )
    return build_runner(settings, quiet)


def relative_error(runner: Runner, path: Path) -> float:
    rng = random.Random(1)
    blocks = Blocks(runner, rng)
    texts = [[rng.randrange(4, runner.vocab_size) for _ in range(length)] for length in LENGTHS]
    sequences = [blocks.sequence(f"s{len(text)}", text) for text in texts]
    got = chunked_logits(runner, sequences, rng)
    oracle = eager(path)
    wants = {s.name: eager_logits(oracle, s.token_ids) for s in sequences}
    largest = max(float(want.abs().max()) for want in wants.values())
    return max(float((got[name] - want).abs().max()) for name, want in wants.items()) / largest


def check(path: Path, model_type: str, number: int) -> None:
    runner = serve(path, model_type, number)
    assert relative_error(runner, path) <= 1e-4
    if runner.linear_backend == "cpu":
        assert isinstance(runner.model, PagedModel)
        assert any(isinstance(module, PackedLinear) for module in runner.model.module.modules())


@pytest.mark.parametrize("model_type", sorted(TRAITS))
def test_trait_holds_in_chunks_and_mixed_batches(tmp_path: Path, model_type: str) -> None:
    check(tmp_path, model_type, len(TYPICAL.get(model_type, ({},))) - 1)


VERIFIED = sorted(name for name, entry in shipped_table().architectures.items() if entry.is_verified)


@pytest.mark.long
@pytest.mark.parametrize("model_type", VERIFIED)
def test_every_verified_architecture_and_configuration(tmp_path: Path, model_type: str) -> None:
    for number in range(len(TYPICAL.get(model_type, ({},)))):
        check(tmp_path / str(number), model_type, number)
