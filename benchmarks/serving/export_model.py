"""Writes the model of the .gguf file as a Hugging Face directory in bfloat16, for servers that read nothing else.

    python -m benchmarks.serving.export_model TARGET [--dtype bfloat16] [--endless]
    python -m benchmarks.serving.export_model TARGET --random-1b

Weights are what the .gguf file's dequantise to, the tokenizer is the one that our server reads from it. --random-1b
writes a Llama of 1.07 G random weights with that tokenizer instead (2.2 GB): what it says is noise, its speed is not.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.gpu_models import LLAMA_1B
from benchmarks.serving.paths import quantised_gguf
from pagefleet_server.models.loading import load_model
from pagefleet_server.settings import ModelSettings
from pagefleet_server.tokenizer import LoadedTokenizer, load_tokenizer

ONE_BILLION_CONFIG: dict[str, Any] = {**LLAMA_1B, "vocab_size": 49152}
"""The shape of Llama 3.2 1B with SmolLM2's vocabulary; its end and start tokens are the tokenizer's."""


def export(target: Path, dtype: str = "bfloat16", *, endless: bool = False) -> None:
    """Write config.json, model.safetensors, the tokenizer and its template. endless: the model has no end token."""
    source = quantised_gguf()
    module: Any = load_model(ModelSettings(model=str(source), dtype=dtype, device="cpu")).module
    tokenizer = load_tokenizer(source)
    target.mkdir(parents=True, exist_ok=True)
    config = module.config.to_dict()
    for private in [key for key in config if key.startswith("_")]:
        del config[private]
    ends = {"eos_token_id": None if endless else tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    config |= {"architectures": [type(module).__name__], "dtype": dtype} | ends
    (target / "config.json").write_text(json.dumps(config, indent=1, default=str))
    (target / "generation_config.json").write_text(json.dumps(ends))
    tied = bool(config.get("tie_word_embeddings"))
    state = {k: v.contiguous() for k, v in module.state_dict().items() if not (tied and k == "lm_head.weight")}
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(tokenizer, target, int(config["max_position_embeddings"]))


def export_random_1b(target: Path) -> None:
    """The shape of floors.ONE_BILLION, tied embeddings, normal weights of standard deviation 0.02, seed 0."""
    tokenizer = load_tokenizer(quantised_gguf())
    target.mkdir(parents=True, exist_ok=True)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    (target / "config.json").write_text(json.dumps(ONE_BILLION_CONFIG | ends, indent=1))
    (target / "generation_config.json").write_text(json.dumps(ends))
    hidden, inner = ONE_BILLION_CONFIG["hidden_size"], ONE_BILLION_CONFIG["intermediate_size"]
    kv = ONE_BILLION_CONFIG["num_key_value_heads"] * ONE_BILLION_CONFIG["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (ONE_BILLION_CONFIG["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(ONE_BILLION_CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (kv, hidden) for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
        for name, shape in shapes.items()
    }
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(tokenizer, target, ONE_BILLION_CONFIG["max_position_embeddings"])


def _write_tokenizer(tokenizer: LoadedTokenizer, target: Path, max_length: int) -> None:
    tokenizer.tokenizer.save(str(target / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.eos_token,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.chat_template:
        about["chat_template"] = tokenizer.chat_template
        (target / "chat_template.jinja").write_text(tokenizer.chat_template)
    (target / "tokenizer_config.json").write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--endless", action="store_true", help="without an end token")
    parser.add_argument("--random-1b", action="store_true", help="a Llama of 1.07 G random weights instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.random_1b:
        export_random_1b(options.target)
    else:
        export(options.target, options.dtype, endless=options.endless)
