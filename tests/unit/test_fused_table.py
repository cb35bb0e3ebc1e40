"""What the fused decoder reads out of configurations and checkpoints, and what it leaves to transformers or refuses."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagefleet_server.model_errors import ModelError, ModelRefused
from pagefleet_server.models.executor import open_model
from pagefleet_server.models.fused.families import FAMILIES, read_spec
from pagefleet_server.models.fused.rope import inverse_frequencies
from pagefleet_server.models.fused.spec import NotFused
from pagefleet_server.settings import ModelSettings
from support.fused_cases import FUSED_CASES
from support.tiny_models import write_tiny

NEEDED = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
}


def full(config: Any) -> dict[str, Any]:
    """As save_pretrained writes it: every value of the class."""
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_what_a_configuration_leaves_out_has_transformers_value(model_type: str) -> None:
    """The sparsest configuration and the one that says everything are the same decoder."""
    sparse = read_spec({"model_type": model_type, **NEEDED})
    assert read_spec(full(AutoConfig.for_model(model_type, **NEEDED))) == sparse


@pytest.mark.parametrize("case", sorted(FUSED_CASES))
def test_rotary_frequencies_are_transformers(case: str) -> None:
    model_type, changes = FUSED_CASES[case]
    sizes = {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "head_dim": 8,
    }
    config = AutoConfig.for_model(model_type, **{**NEEDED, **sizes, **changes})
    for layer in read_spec(full(config)).layers:
        if layer.rope is None:
            continue
        frequencies, scale = inverse_frequencies(layer.rope)
        nested = "full_attention" in config.rope_parameters
        kind = ("sliding_attention" if layer.sliding_window else "full_attention") if nested else None
        if layer.rope.kind == "default":
            dim = layer.rope.rotary_dim
            want, factor = 1.0 / layer.rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim), 1.0
        else:
            want, factor = ROPE_INIT_FUNCTIONS[layer.rope.kind](config, torch.device("cpu"), layer_type=kind)
        assert torch.allclose(frequencies, want, rtol=1e-6, atol=0.0)
        assert scale == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 500.0},
        {"rope_theta": 500.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ],
)
def test_older_forms_of_rotary_settings(changes: dict[str, Any]) -> None:
    rope = read_spec({"model_type": "llama", **NEEDED, **changes}).layers[0].rope
    assert rope is not None and rope.theta == 500.0
    assert rope.kind == ("linear" if "rope_scaling" in changes else "default")


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"attention_sink_size": 4}, "attention_sink_size"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_key_value_heads": 5}, "5 kv heads"),
        ({"architectures": ["SomethingForSequenceClassification"]}, "SomethingForSequenceClassification"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
    ],
)
def test_what_it_does_not_know_is_left_to_transformers(model_type: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(NotFused, match=named):
        read_spec({"model_type": model_type, **NEEDED, **changes})


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("llama", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "proportional"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "new": 1}}, "new"),
        ("llama", {"hidden_act": "relu2"}, "relu2"),
        ("llama", {"sliding_window": 8}, "sliding_window"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 8}, "chunked_attention"),
        ("qwen3", {"layer_types": ["full_attention"] * 3}, "3 entries"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "later"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [1.0]}},
            "short_factor",
        ),
        ("mixtral", {}, "mixtral"),
    ],
)
def test_traits_outside_the_table(model_type: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(NotFused, match=named):
        read_spec({"model_type": model_type, **NEEDED, **changes})


def test_kinds_that_rescale_are_held_to_the_length_before_it() -> None:
    short = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    config = {**NEEDED, "max_position_embeddings": 4096, "original_max_position_embeddings": 128}
    assert read_spec({"model_type": "phi3", **config, "rope_parameters": short}).max_positions == 128
    assert read_spec({"model_type": "phi3", **config}).max_positions == 4096


def opened(path: Path, **changes: Any) -> Any:
    return open_model(ModelSettings(model=str(path), device="cpu", **{"executor": "fused", **changes}))


def rewrite(path: Path, change: Any) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "qwen3")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.bonus.weight"] = tensors.pop("model.layers.0.self_attn.q_norm.weight")
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    rewrite(path, change)
    with pytest.raises(
        ModelError, match=r"missing: model\.layers\.0\.self_attn\.q_norm\.weight; not expected: model\."
    ) as e:
        opened(path)
    assert "bonus" in str(e.value) and "inv_freq" not in str(e.value)


def test_another_shape_than_the_configurations_is_named(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "llama")
    rewrite(path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is \[31\]; by the configuration it is \[32\]"):
        opened(path)


def test_a_tied_output_layer_may_stand_in_the_file(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "llama", tie_word_embeddings=True)
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    opened(path)


def test_integers_in_the_file_are_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "llama")
    rewrite(path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int32)}))
    from pagefleet_kernels.dispatch import select_backend

    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored as I32"):
        opened(path).load(select_backend(torch.device("cpu"), "reference"))


def test_asking_for_the_fused_decoder_where_it_does_not_serve(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "mixtral")
    with pytest.raises(ModelRefused, match="mixtral is not in its table; use --executor auto"):
        opened(path)


def test_dummy_weights_are_the_same_in_every_process_and_fit_every_family(tmp_path: Path) -> None:
    from pagefleet_kernels.dispatch import select_backend

    backend = select_backend(torch.device("cpu"), "reference")
    for case, (model_type, changes) in FUSED_CASES.items():
        path = write_tiny(tmp_path / case.replace(" ", ""), model_type, **changes)
        first, second = (opened(path, load_format="dummy").load(backend)[0] for _ in range(2))
        assert torch.equal(first.weights.embedding, second.weights.embedding)
        assert dataclasses.asdict(first.spec) == dataclasses.asdict(second.spec)
