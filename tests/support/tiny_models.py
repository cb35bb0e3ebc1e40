"""Tiny random models on disk, in float32, small enough for a step to take milliseconds."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

BOS_ID, EOS_ID, FIRST_BYTE_ID = 0, 1, 3
VOCAB_SIZE = 320
"""Padded: ids from 262 up have no token."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_llama(path: Path, *, seed: int = 0, max_positions: int = 512, **changes: Any) -> Path:
    """A Hugging Face directory with configuration, float32 weights, byte tokenizer and chat template."""
    config = LlamaConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": max_positions,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "tie_word_embeddings": False,
            # Large weights: logits far apart, so that greedy choices are not ties.
            "initializer_range": 0.3,
            **changes,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)  # type: ignore[arg-type]
    byte_tokenizer().save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return path


def byte_tokenizer() -> Tokenizer:
    """One token per byte, after <s>, </s> and <|im_start|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, "<|im_start|>": 2} | {c: i + FIRST_BYTE_ID for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<|im_start|>")])
    return tokenizer


_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"layer_types": ["full_attention", "full_attention"]},
    "qwen2": {"layer_types": ["full_attention", "full_attention"]},
    "mistral": {"sliding_window": 11},
    "gemma2": {"sliding_window": 9, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 7, "query_pre_attn_scalar": 8},
    "gpt_oss": {"sliding_window": 13, "num_local_experts": 2, "num_experts_per_tok": 1},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "olmo2": {},
    "phi3": {"original_max_position_embeddings": 256},
}
"""model_type -> what it needs beyond the common sizes."""


def write_tiny(path: Path, model_type: str, **changes: Any) -> Path:
    """A Hugging Face directory of any architecture, without tokenizer."""
    config = AutoConfig.for_model(model_type, **{**_COMMON, **ARCHITECTURES.get(model_type, {}), **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    module.save_pretrained(path)
    return path


def eager(path: Path) -> PreTrainedModel:
    """transformers' own eager attention, float32: the oracle."""
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    assert isinstance(module, PreTrainedModel)
    return module


@torch.inference_mode()
def eager_logits(module: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Logits [T, V] of one sequence on its own."""
    logits: torch.Tensor = module(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits
