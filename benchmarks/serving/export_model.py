"""Writes the model of the .gguf file as a Hugging Face directory in bfloat16, for servers that read nothing else.

    python -m benchmarks.serving.export_model TARGET [--dtype bfloat16] [--endless]

Weights are what the .gguf file's dequantise to, the tokenizer is the one that our server reads from it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.serving.paths import quantised_gguf
from pagefleet_server.models.loading import load_model
from pagefleet_server.settings import ModelSettings
from pagefleet_server.tokenizer import load_tokenizer


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
    tokenizer.tokenizer.save(str(target / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.eos_token,
        "model_max_length": int(config["max_position_embeddings"]),
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
    options = parser.parse_args()
    torch.set_num_threads(1)
    export(options.target, options.dtype, endless=options.endless)
