"""The gate's self-test: it passes what transformers runs on our attention, and finds what would be wrong."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagefleet_server.model_errors import ModelRefused, ModelUnverified
from pagefleet_server.models import self_test as self_test_room
from pagefleet_server.models import verification
from pagefleet_server.models.attention_hook import LayerCall
from pagefleet_server.models.dense_context import DenseContext
from pagefleet_server.models.self_test import MAX_RELATIVE_ERROR, self_test
from pagefleet_server.models.shrunken import kept_layers, shrink
from pagefleet_server.models.verification import Verdict, shipped_table, verify
from tools.survey_models import PAGE, TYPICAL, render, survey_one

FEATURES = {
    "plain": ("llama", "qwen2", "qwen3", "olmo2", "smollm3", "seed_oss", "apertus", "nanochat"),
    "windows": ("mistral", "gemma3_text", "cohere2", "olmo3", "exaone4", "phi3", "starcoder2"),
    "soft caps": ("gemma2", "gemma3n_text"),
    "sinks": ("gpt_oss",),
    "experts": ("mixtral", "qwen3_moe", "glm4_moe", "granitemoe", "olmoe", "dots1"),
    "K wider than V": ("deepseek_v2", "deepseek_v3", "minicpm3"),
    "shared KV layers and head widths by layer": ("gemma4_text", "gemma4_unified_text"),
    "learned positions, parallel blocks, one KV head": ("gpt2", "opt", "phi", "gpt_neox", "gpt_bigcode"),
    "scaled": ("granite",),
}


@pytest.mark.parametrize("model_type", [name for names in FEATURES.values() for name in names])
def test_architecture_passes_with_every_typical_configuration(model_type: str) -> None:
    entry = survey_one(model_type)
    assert entry.is_verified, entry.reason
    listed = shipped_table().architectures[model_type]
    assert listed.is_verified and listed.model_class == entry.model_class
    if transformers.__version__ == shipped_table().transformers_version:
        assert listed.switches == entry.switches


def altered(change: Callable[[LayerCall], LayerCall]) -> Callable[..., torch.Tensor]:
    right = DenseContext.attend

    def attend(self: DenseContext, call: LayerCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return right(self, change(call), q, k, v)

    return attend


PLANTED: dict[str, tuple[str, Callable[[LayerCall], LayerCall]]] = {
    "a window one key too wide": ("gemma2", lambda c: dataclasses.replace(c, sliding_window=33)),
    "no window": ("cohere2", lambda c: dataclasses.replace(c, sliding_window=None)),
    "no soft cap": ("gemma2", lambda c: dataclasses.replace(c, softcap=None)),
    "no sinks": ("gpt_oss", lambda c: dataclasses.replace(c, sinks=None)),
    "another scale": ("granite", lambda c: dataclasses.replace(c, scale=1.1 * c.scale)),
}


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_attention_that_is_a_little_wrong_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model_type, change = PLANTED[name]
    config = AutoConfig.for_model(model_type)
    self_test(config)
    monkeypatch.setattr(DenseContext, "attend", altered(change))
    with pytest.raises(ModelUnverified, match="off by"):
        self_test(config)


def test_positions_taken_from_the_row_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of several sequences in one batch: a model that counts rows instead of reading positions differs."""
    right = self_test_room._paged

    def paged(module: torch.nn.Module, texts: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        def count_rows(
            _: object, args: object, kwargs: dict[str, torch.Tensor]
        ) -> tuple[object, dict[str, torch.Tensor]]:
            rows = torch.arange(kwargs["input_ids"].shape[1]).unsqueeze(0)
            return args, {**kwargs, "position_ids": rows}

        hook = module.register_forward_pre_hook(count_rows, with_kwargs=True)
        try:
            return right(module, texts)  # type: ignore[arg-type]
        finally:
            hook.remove()

    monkeypatch.setattr(self_test_room, "_paged", paged)
    with pytest.raises(ModelUnverified, match="off by"):
        self_test(AutoConfig.for_model("llama"))


@pytest.mark.parametrize(
    ("model_type", "changes", "want"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "attend to later"),
        ("roberta", {"is_decoder": True}, "off by|failed"),
        ("bert", {}, "is_causal"),
        ("doge", {}, "attention_mask"),
        ("granitemoehybrid", {}, "linear_attention|no small copy"),
    ],
)
def test_architecture_that_would_be_wrong_does_not_pass(model_type: str, changes: dict[str, object], want: str) -> None:
    with pytest.raises(ModelRefused, match=want):
        self_test(AutoConfig.for_model(model_type, **changes))


def test_listed_architecture_is_not_tested_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(verification, "self_test", never)
    for model_type in ("llama", "qwen2", "mixtral", "gpt_oss"):
        config = AutoConfig.for_model(model_type, num_hidden_layers=3)
        assert verify(config, trust=False, remembered=tmp_path) == Verdict("list")


def never(config: PreTrainedConfig) -> None:
    raise AssertionError(f"{config.model_type} is tested")


def test_switch_that_was_not_surveyed_is_tested_once_and_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = AutoConfig.for_model("llama", mlp_bias=True)
    assert verify(config, trust=False, remembered=tmp_path) == Verdict("self-test")
    monkeypatch.setattr(verification, "self_test", never)
    assert verify(config, trust=False, remembered=tmp_path) == Verdict("memory")
    monkeypatch.setattr(transformers, "__version__", "99.0")
    with pytest.raises(AssertionError, match="is tested"):
        verify(config, trust=False, remembered=tmp_path)


def test_a_listed_name_does_not_cover_a_switch_that_makes_it_wrong(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(ModelRefused, match="attend to later"):
        verify(config, trust=False, remembered=tmp_path)


def test_failure_is_not_remembered_and_trust_overrides_it_loudly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(DenseContext, "attend", altered(lambda c: dataclasses.replace(c, scale=2 * c.scale)))
    config = AutoConfig.for_model("llama", mlp_bias=True)
    for _ in range(2):
        with pytest.raises(ModelUnverified, match="--trust-unverified-model"):
            verify(config, trust=False, remembered=tmp_path)
    with caplog.at_level(logging.WARNING):
        assert verify(config, trust=True, remembered=tmp_path) == Verdict("trust")
    assert "ANSWERS MAY BE WRONG" in caplog.text
    assert not list(tmp_path.iterdir())


def test_read_only_cache_only_costs_the_next_test(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = AutoConfig.for_model("llama", mlp_bias=True)
    for _ in range(2):
        assert verify(config, trust=False, remembered=tmp_path / "file" / "folder") == Verdict("self-test")


def test_page_and_list_agree_and_cover_transformers() -> None:
    table = shipped_table()
    assert render(table) == PAGE.read_text(encoding="utf-8"), "run tools/survey_models.py --page"
    assert sum(entry.is_verified for entry in table.architectures.values()) >= 95
    assert all(entry.is_verified != bool(entry.reason) for entry in table.architectures.values())
    assert all(
        entry.relative_error is None or entry.relative_error <= MAX_RELATIVE_ERROR
        for entry in table.architectures.values()
    )
    if transformers.__version__ == table.transformers_version:
        assert set(table.architectures) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize(
    ("model_type", "want"), [("llama", [0, 1]), ("gemma2", [0, 1, 2, 3]), ("gemma3_text", [0, 1, 5, 11])]
)
def test_each_kind_of_layer_stays_twice(model_type: str, want: list[int]) -> None:
    assert kept_layers(AutoConfig.for_model(model_type).to_dict()) == want


def test_small_copy_keeps_what_decides() -> None:
    large = AutoConfig.for_model("gemma4_text", **TYPICAL["gemma4_text"][1])
    small = shrink(large)
    assert small.sliding_window == 32
    assert set(small.layer_types) == set(large.layer_types)
    assert 0 < small.num_kv_shared_layers < small.num_hidden_layers
    values = small.to_dict()
    assert {layer["head_dim"] for layer in values["per_layer_config"].values()} == {2 * values["head_dim"]}
    assert (small.rms_norm_eps, small.hidden_activation) == (large.rms_norm_eps, large.hidden_activation)
