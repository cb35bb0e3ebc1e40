"""--attention-backend: a named one serves, or the start is refused with its reason; FlashAttention's adapter behind the
whole server."""

import random
from pathlib import Path

import pytest
import torch

from pagefleet_kernels.varlen import VarlenBackend
from pagefleet_server.model_errors import ModelError
from pagefleet_server.runner import runner as runner_module
from pagefleet_server.runner.runner import Runner, build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings
from support.fake_varlen import varlen_attn
from support.stepping import Blocks, chunked_logits, quiet
from support.tiny_models import eager, eager_logits, write_tiny


def build(path: Path, backend: str, *, dtype: str = "float32", block_size: int = 16) -> Runner:
    settings = EngineSettings(
        model=ModelSettings(model=str(path), device="cpu", dtype=dtype, threads=1, attention_backend=backend),
        cache=CacheSettings(num_kv_blocks=8, block_size=block_size),
    )
    return build_runner(settings, quiet)


def test_a_named_backend_serves(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "llama")
    assert build(path, "auto").attention_backend == "cpu"
    assert build(path, "reference").attention_backend == "reference"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["triton", "varlen", "flashinfer"])
def test_one_that_needs_a_gpu_says_so(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=f"--attention-backend: {name}: no CUDA device"):
        build(write_tiny(tmp_path, "llama"), name)


def test_what_auto_would_leave_to_another_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "llama")
    assert build(path, "auto", dtype="float16").attention_backend == "reference"
    with pytest.raises(ModelError, match=r"--attention-backend cpu cannot serve this model: .* not torch.float16"):
        build(path, "cpu", dtype="float16")


def test_flash_attentions_adapter_behind_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "select_backend", lambda device, name: VarlenBackend(varlen_attn))
    path = write_tiny(tmp_path, "mistral")
    with pytest.raises(ModelError, match="block_size is 16; it must be a multiple of 256"):
        build(path, "varlen", dtype="bfloat16")
    runner = build(path, "varlen", dtype="bfloat16", block_size=256)
    assert runner.attention_backend == "varlen"
    rng = random.Random(4)
    texts = [[rng.randrange(3, runner.vocab_size) for _ in range(length)] for length in (3, 40)]
    blocks = Blocks(runner, rng)
    sequences = [blocks.sequence(str(index), text) for index, text in enumerate(texts)]
    got = chunked_logits(runner, sequences, rng)
    want = torch.cat([eager_logits(eager(path), text) for text in texts])
    error = torch.cat([got["0"], got["1"]]).float() - want
    assert float(error.norm() / want.norm()) < 0.05
