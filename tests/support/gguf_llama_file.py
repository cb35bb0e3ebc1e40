"""A tiny Llama written as .gguf by the gguf package, with ggml's own order of q and k rows."""

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def tiny_llama_gguf(path: Path, *, tied: bool, kind: str = "F32") -> tuple[Path, LlamaForCausalLM]:
    """Returns the file and the float32 model that was written; quantised kinds round its matrices first."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = LlamaForCausalLM(config)
    quantisation = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(64)
    writer.add_eos_token_id(3)
    for name, parameter in module.named_parameters():
        matrix = parameter.dim() == 2
        if matrix:
            packed = gguf.quants.quantize(parameter.detach().numpy(), quantisation)
            rounded = torch.from_numpy(np.array(gguf.quants.dequantize(packed, quantisation), dtype=np.float32))
            parameter.data.copy_(rounded.view(parameter.shape))
        data = parameter.detach()
        for projection, heads in (("q_proj", 4), ("k_proj", 2)):
            if projection in name:
                data = data.view(heads, 2, 8, 64).transpose(1, 2).reshape(data.shape)
        array = data.contiguous().numpy()
        if matrix:
            writer.add_tensor(_ggml_name(name), gguf.quants.quantize(array, quantisation), raw_dtype=quantisation)
        else:
            writer.add_tensor(_ggml_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, module


def _ggml_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        layer, _, module = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{_NAMES[module]}.weight"
    return f"{_NAMES[stem]}.weight"
