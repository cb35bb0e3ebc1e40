"""What cannot be served is refused at once, with the file or the reason."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from pagefleet_server.model_errors import ModelError, ModelRefused
from pagefleet_server.models.loading import load_model
from pagefleet_server.models.paged_model import PagedModel
from pagefleet_server.runner.runner import build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings
from support.gguf_bytes import gguf, text
from support.smollm2 import smollm2_gguf
from support.stepping import quiet
from support.tiny_models import write_tiny_llama


def load(path: Path, *, load_format: str = "auto") -> PagedModel:
    return load_model(ModelSettings(model=str(path), device="cpu", load_format=load_format))


def write_config(path: Path, model_type: str, **fields: object) -> Path:
    AutoConfig.for_model(model_type, **fields).save_pretrained(path)
    return path


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "recurrent": ("mamba", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}, "linear_attention"),
    "encoder-decoder": ("t5", {"vocab_size": 64, "d_model": 32, "num_layers": 2}, "no causal language model"),
    "no language model": ("vit", {"hidden_size": 32, "num_hidden_layers": 2}, "no causal language model"),
    "attention in chunks": (
        "llama4_text",
        {**SMALL, "num_local_experts": 2, "layer_types": ["chunked_attention", "full_attention"]},
        "chunked_attention",
    ),
    "linear attention layers": ("qwen3_next", {**SMALL, "num_experts": 2}, "linear_attention"),
    "alibi without interface": (
        "bloom",
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "do not call attention",
    ),
    "two attention calls": ("diffllama", {**SMALL, "num_key_value_heads": 4}, "more than once|AttentionInterface"),
    "keyword arguments lost": ("stablelm", {**SMALL, "num_key_value_heads": 4}, "keyword arguments"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_architecture_that_would_be_wrong_is_refused(tmp_path: Path, name: str) -> None:
    model_type, fields, want = REFUSED[name]
    with pytest.raises(ModelRefused, match=want) as error:
        load(write_config(tmp_path, model_type, **fields), load_format="dummy")
    assert str(tmp_path) in str(error.value)


def test_directory_gives_limits_and_end_tokens(tmp_path: Path) -> None:
    model = load(write_tiny_llama(tmp_path, max_positions=128))
    assert (model.max_positions, model.eos_token_ids, model.vocab_size, len(model.layers)) == (128, (1,), 320, 2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1, 7]}))
    assert load(tmp_path).eos_token_ids == (1, 7)


def test_dummy_weights_need_no_weight_file_and_are_the_same_each_time(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    first, second = (load(tmp_path, load_format="dummy") for _ in range(2))
    parameters = zip(first.module.parameters(), second.module.parameters(), strict=True)
    assert all(bool((a == b).all()) for a, b in parameters)


def test_longrope_is_held_to_the_length_where_neighbours_do_not_matter(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope |= {"original_max_position_embeddings": 64, "factor": 8.0}
    write_tiny_llama(tmp_path, max_positions=512, rope_parameters=rope)
    assert load(tmp_path).max_positions == 64


def damaged(tmp_path: Path, name: str) -> Path:
    """A broken model by the name of what is wrong."""
    if name == "nothing there":
        return tmp_path / "none"
    if name == "a text file":
        (tmp_path / "model.txt").write_text("hello")
        return tmp_path / "model.txt"
    if name == "not a GGUF file":
        (tmp_path / "model.gguf").write_text("hello, I am no model")
        return tmp_path / "model.gguf"
    if name == "half a GGUF file":
        (tmp_path / "model.gguf").write_bytes(smollm2_gguf().read_bytes()[:50_000_000])
        return tmp_path / "model.gguf"
    if name == "a GGUF file of unknown architecture":
        (tmp_path / "model.gguf").write_bytes(gguf([("general.architecture", 8, text("martian"))]))
        return tmp_path / "model.gguf"
    if name == "an empty directory":
        return tmp_path
    write_tiny_llama(tmp_path)
    weights = tmp_path / "model.safetensors"
    if name == "no weights":
        weights.unlink()
    elif name == "only pickled weights":
        weights.rename(tmp_path / "pytorch_model.bin")
    elif name == "half the weights":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif name == "weights of three bytes":
        weights.write_bytes(b"abc")
    elif name == "a damaged header":
        weights.write_bytes(weights.read_bytes()[:8] + b"x" * (weights.stat().st_size - 8))
    elif name == "a missing shard":
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    elif name == "an index without map":
        (tmp_path / "model.safetensors.index.json").write_text("{}")
    elif name == "a configuration that is no JSON":
        (tmp_path / "config.json").write_text("{")
    elif name == "a configuration of no model":
        (tmp_path / "config.json").write_text("{}")
    return tmp_path


DAMAGE = {
    "nothing there": "no such file or directory",
    "a text file": "neither a directory nor a .gguf",
    "not a GGUF file": "no GGUF file",
    "half a GGUF file": "truncated: 50000000 bytes",
    "a GGUF file of unknown architecture": "not understood",
    "an empty directory": "holds no config.json",
    "no weights": "model.safetensors: not found; fetch",
    "only pickled weights": "convert the pickled",
    "half the weights": "truncated",
    "weights of three bytes": "truncated or no safetensors",
    "a damaged header": "header is damaged",
    "a missing shard": "model-1.safetensors: not found",
    "an index without map": "no weight_map",
    "a configuration that is no JSON": "config.json: cannot be read as JSON",
    "a configuration of no model": "not understood",
}


@pytest.mark.parametrize("name", sorted(DAMAGE))
def test_broken_model_is_refused_with_its_file(tmp_path: Path, name: str) -> None:
    path = damaged(tmp_path, name)
    with pytest.raises(ModelError, match=DAMAGE[name]) as error:
        load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("model", "cache", "want"),
    [
        ({"max_model_len": 0}, {}, "--max-model-len 0"),
        ({"max_model_len": 513}, {}, "own limit is 512"),
        ({"threads": 0}, {}, "--threads 0"),
        ({"load_format": "magic"}, {}, "--load-format 'magic'"),
        ({"dtype": "int4"}, {}, "--dtype 'int4'"),
        ({}, {"kv_cache_memory_bytes": 10}, "KV cache gets 10 bytes"),
        ({}, {"block_size": 12}, "block_size is 12"),
    ],
)
def test_setting_out_of_bounds_is_refused(
    tmp_path: Path, model: dict[str, object], cache: dict[str, object], want: str
) -> None:
    settings = EngineSettings(
        model=ModelSettings(model=str(write_tiny_llama(tmp_path)), device="cpu", **model),  # type: ignore[arg-type]
        cache=CacheSettings(**cache),  # type: ignore[arg-type]
    )
    with pytest.raises(ModelError, match=want):
        build_runner(settings, quiet)


@pytest.mark.parametrize(("blocks", "asked", "want"), [(64, None, 512), (64, 100, 100), (4, None, 64), (4, 100, 64)])
def test_context_is_capped_by_flag_and_by_blocks(tmp_path: Path, blocks: int, asked: int | None, want: int) -> None:
    settings = EngineSettings(
        model=ModelSettings(model=str(write_tiny_llama(tmp_path)), device="cpu", max_model_len=asked, threads=1),
        cache=CacheSettings(num_kv_blocks=blocks),
    )
    phases: list[str] = []
    runner = build_runner(settings, lambda phase, message, **_: phases.append(phase))
    assert (runner.max_model_len, runner.num_blocks, runner.block_size) == (want, blocks, 16)
    # Without a compiler the reference serves, and torch's own linears.
    assert (runner.attention_backend, runner.linear_backend) in (("cpu", "cpu"), ("reference", "torch"))
    assert list(dict.fromkeys(phases)) == ["load_weights", "allocate_kv", "warm_up"]
    assert set(runner.start_seconds) == {"load_weights", "allocate_kv", "warm_up"}


def test_model_that_the_fast_backend_cannot_hold_runs_on_the_reference(tmp_path: Path) -> None:
    settings = EngineSettings(
        model=ModelSettings(model=str(write_tiny_llama(tmp_path)), device="cpu", dtype="float16", threads=1),
        cache=CacheSettings(num_kv_blocks=8),
    )
    runner = build_runner(settings, quiet)
    assert (runner.attention_backend, runner.linear_backend) == ("reference", "torch")
