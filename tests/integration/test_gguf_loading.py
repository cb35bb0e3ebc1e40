"""Our direct reader of Llama files against what was written, and against transformers' reader."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagefleet_server.gguf_metadata import GGUFTensor, read_gguf_metadata
from pagefleet_server.model_errors import ModelError
from pagefleet_server.models import loading
from pagefleet_server.models.gguf_llama import LlamaTensors, llama_config
from pagefleet_server.models.loading import load_model
from pagefleet_server.models.paged_model import PagedModel
from pagefleet_server.settings import ModelSettings
from support.gguf_bytes import gguf, text
from support.gguf_llama_file import tiny_llama_gguf
from support.smollm2 import smollm2_gguf


def load(path: Path) -> PagedModel:
    return load_model(ModelSettings(model=str(path), device="cpu", dtype="float32"))


def assert_same_weights(got: torch.nn.Module, want: torch.nn.Module) -> None:
    have, wanted = got.state_dict(), want.state_dict()
    assert have.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(have[name], tensor), name


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_what_was_written(tmp_path: Path, kind: str, tied: bool) -> None:
    path, written = tiny_llama_gguf(tmp_path / "m.gguf", tied=tied, kind=kind)
    model = load(path)
    assert_same_weights(model.module, written)
    assert (model.max_positions, model.eos_token_ids, model.vocab_size) == (128, (3,), 64)


def test_configuration_is_what_was_written(tmp_path: Path) -> None:
    path, written = tiny_llama_gguf(tmp_path / "m.gguf", tied=True)
    config = llama_config(read_gguf_metadata(path))
    assert config is not None
    for name in ("rms_norm_eps", "rope_parameters", "head_dim", "intermediate_size", "num_key_value_heads"):
        assert getattr(config, name) == pytest.approx(getattr(written.config, name)), name


def test_direct_reader_agrees_with_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = tiny_llama_gguf(tmp_path / "m.gguf", tied=False, kind="Q8_0")
    direct = load(path)
    monkeypatch.setattr(loading, "llama_config", lambda metadata: None)
    assert_same_weights(direct.module, load(path).module)


@pytest.mark.long
def test_direct_reader_agrees_with_transformers_on_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    direct = load(smollm2_gguf())
    monkeypatch.setattr(loading, "llama_config", lambda metadata: None)
    through = load(smollm2_gguf())
    assert_same_weights(direct.module, through.module)
    for name in ("rms_norm_eps", "head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(direct.module.config, name) == getattr(through.module.config, name), name
    assert direct.module.config.rope_parameters["rope_theta"] == through.module.config.rope_parameters["rope_theta"]


@pytest.mark.parametrize("key", ["llama.rope.scaling.factor", "llama.expert_count"])
def test_file_with_more_than_we_understand_goes_through_transformers(tmp_path: Path, key: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([("general.architecture", 8, text("llama")), (key, 4, b"\2\0\0\0")]))
    assert llama_config(read_gguf_metadata(path)) is None


@pytest.mark.parametrize("kind", [9, 41])  # without a reader in the gguf package; 41 in older ones without a name, too
def test_a_type_that_nobody_reads_is_refused_by_its_tensor(tmp_path: Path, kind: int) -> None:
    metadata = read_gguf_metadata(tiny_llama_gguf(tmp_path / "m.gguf", tied=True)[0])
    place = metadata.tensors["token_embd.weight"]
    damaged = replace(
        metadata, tensors={**metadata.tensors, "token_embd.weight": GGUFTensor((128, 32), kind, place.offset)}
    )
    with pytest.raises(ModelError, match=f"token_embd.weight of ggml type {kind} cannot be read.*another quantisation"):
        LlamaTensors(damaged).read("model.embed_tokens.weight", torch.float32)


def test_a_file_cut_after_its_metadata_were_read_is_refused(tmp_path: Path) -> None:
    path, _ = tiny_llama_gguf(tmp_path / "m.gguf", tied=True, kind="Q8_0")
    tensors = LlamaTensors(read_gguf_metadata(path))
    os.truncate(path, path.stat().st_size // 2)
    cut = [name for name in tensors.shapes() if name.startswith("model.layers.1.mlp.")]
    assert cut
    for name in cut:
        with pytest.raises(ModelError, match=r"ends within tensor blk\.1\..*fetch it again"):
            tensors.read(name, torch.float32)
        with pytest.raises(ModelError, match=r"ends within tensor blk\.1\..*fetch it again"):
            tensors.read_grouped(name)


def test_a_matrix_without_scales_is_not_read_for_them(tmp_path: Path) -> None:
    path, _ = tiny_llama_gguf(tmp_path / "m.gguf", tied=True, kind="F16")
    tensors = LlamaTensors(read_gguf_metadata(path))
    path.unlink()
    assert tensors.read_grouped("model.embed_tokens.weight") is None
