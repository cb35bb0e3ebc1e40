"""Models that need no download: configurations of a known shape, and a tokenizer of bytes."""

import json
from pathlib import Path
from typing import Any

LLAMA_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.02,
    "dtype": "bfloat16",
}
"""The shape of Llama 3.2 1B: 1.24 billion weights."""
TWO_LAYERS: dict[str, Any] = {
    **LLAMA_1B,
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "dtype": "float32",
}
"""Two layers; large weights, so that greedy choices are not ties."""
TINY: dict[str, Any] = {
    **TWO_LAYERS,
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
"""For trying the scripts where there is no GPU."""


def write_config(path: Path, config: dict[str, Any]) -> Path:
    """A directory for --load-format dummy, with a tokenizer of bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in names[:2]])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def write_weights(path: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """The same with random float32 weights, as transformers makes them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    write_config(path, config)
    kept = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "dtype")}
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**kept)).to(torch.float32).save_pretrained(path)  # type: ignore[arg-type]
    return path
