"""Llama-shaped .gguf files, read directly: transformers' own reader takes ten times as long to start.

Only files whose every key and tensor is understood come this way; anything else goes through transformers.
"""

import math
import mmap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from pagefleet_kernels.grouped import GroupedWeight
from pagefleet_server.gguf_metadata import TENSOR_BLOCKS, GGUFMetadata, GGUFTensor
from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.gguf_blocks import dequantize
from pagefleet_server.models.gguf_groups import bytes_per_weight, grouped_weight

if TYPE_CHECKING:
    from transformers import LlamaConfig

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Tensor of block b (`blk.b.NAME.weight`) -> module of layer b."""
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CHUNK_ELEMENTS = 1 << 15
"""Dequantised at once, in cache and on one thread; a multiple of every type's block."""
_OPTIONAL = {"output.weight"}
"""Absent when the output layer is tied to the embedding."""

_KEYS = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "vocab_size",
    }
)
"""Keys below `llama.` that we understand; RoPE scaling, experts and the like are not among them."""


def llama_config(metadata: GGUFMetadata) -> "LlamaConfig | None":
    """The configuration of a plain Llama file; None when the file holds anything that we do not understand."""
    values = llama_values(metadata)
    if values is None:
        return None
    from transformers import LlamaConfig

    return LlamaConfig(**values)  # type: ignore[arg-type]


def llama_values(metadata: GGUFMetadata) -> dict[str, object] | None:
    """What config.json of a plain Llama file would hold; None when it holds anything that we do not understand."""
    values = {key.removeprefix("llama."): value for key, value in metadata.values.items() if key.startswith("llama.")}
    if metadata.get_str("general.architecture") != "llama" or not values.keys() <= _KEYS:
        return None

    def number(key: str, default: int | None = None) -> int:
        value = metadata.get_int(f"llama.{key}")
        if value is None:
            value = default
        if value is None or value < 1:
            raise ModelError(f"{metadata.path}: llama.{key} is {value}; it must be an integer >= 1")
        return value

    heads, hidden = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", hidden // heads)
    if {number("attention.value_length", head_dim), number("rope.dimension_count", head_dim)} != {head_dim}:
        return None
    embedding = metadata.tensors.get("token_embd.weight")
    layers = number("block_count")
    names = set(_names(layers))
    found = set(metadata.tensors)
    if not names - _OPTIONAL <= found <= names:
        return None
    return {
        "vocab_size": number("vocab_size", embedding.dims[-1] if embedding is not None else None),
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": _number(values.get("attention.layer_norm_rms_epsilon"), 1e-5),
        "rope_parameters": {"rope_type": "default", "rope_theta": _number(values.get("rope.freq_base"), 10000.0)},
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "bos_token_id": metadata.get_int("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get_int("tokenizer.ggml.eos_token_id"),
    }


def llama_state(metadata: GGUFMetadata, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every parameter in dtype, dequantised one by one: the peak is the result plus one tensor in float32."""
    tensors = LlamaTensors(metadata)
    return {name: tensors.read(name, dtype) for name in tensors.shapes()}


class LlamaTensors:
    """The tensors of a file that llama_values understands, by transformers' names."""

    def __init__(self, metadata: GGUFMetadata) -> None:
        values = llama_values(metadata)
        if values is None:
            raise ModelError(f"{metadata.path}: is no plain Llama file")
        layers = cast(int, values["num_hidden_layers"])
        self._metadata = metadata
        self._heads = {".attn_q.": cast(int, values["num_attention_heads"])}
        self._heads[".attn_k."] = cast(int, values["num_key_value_heads"])
        places = _names(layers).items()
        self._names = {f"{module}.weight": name for name, module in places if name in metadata.tensors}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor, in torch's order of dimensions."""
        return {module: self._metadata.tensors[name].dims[::-1] for module, name in self._names.items()}

    def read(self, module: str, dtype: torch.dtype) -> torch.Tensor:
        """Dequantised in float32, rounded to dtype, in transformers' order of rows."""
        name = self._names[module]
        with self._metadata.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            weight = _read(data, self._metadata.tensors[name], name, self._metadata, dtype)
        return self._in_order(name, weight)

    def kind(self, module: str) -> int:
        """ggml type of the tensor."""
        return self._metadata.tensors[self._names[module]].kind

    def read_grouped(self, module: str) -> GroupedWeight | None:
        """A matrix in its own scales, in transformers' order of rows; None for a type without them."""
        name = self._names[module]
        tensor = self._metadata.tensors[name]
        if len(tensor.dims) != 2 or bytes_per_weight(tensor.kind) is None:
            return None
        raw = torch.empty(_num_bytes(tensor), dtype=torch.uint8)
        with self._metadata.path.open("rb") as file:
            file.seek(tensor.offset)
            if file.readinto(memoryview(raw.numpy())) != len(raw):  # type: ignore[arg-type]
                raise _ends_within(name, self._metadata)
        weight = grouped_weight(tensor.kind, raw, tensor.dims[1])
        return None if weight is None else weight.map(lambda part: self._in_order(name, part))

    def _in_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        for part, heads in self._heads.items():
            if part in name:
                return _unpermute(rows, heads)
        return rows


def _names(num_layers: int) -> Mapping[str, str]:
    """Tensor name in the file -> module name."""

    def pairs() -> Iterator[tuple[str, str]]:
        for tensor, module in _OUTER.items():
            yield f"{tensor}.weight", module
        for layer in range(num_layers):
            for tensor, module in _LAYER.items():
                yield f"blk.{layer}.{tensor}.weight", f"model.layers.{layer}.{module}"

    return dict(pairs())


def _read(data: mmap.mmap, tensor: GGUFTensor, name: str, metadata: GGUFMetadata, dtype: torch.dtype) -> torch.Tensor:
    """In torch's order of dimensions. Some thousand blocks at a time: fresh memory costs more than the arithmetic."""
    per_block, block_bytes = TENSOR_BLOCKS[tensor.kind]
    if tensor.offset + _num_bytes(tensor) > len(data):
        raise _ends_within(name, metadata)
    weight = torch.empty(tensor.dims[::-1], dtype=dtype)
    flat = weight.view(-1)
    chunk = CHUNK_ELEMENTS // per_block
    for first in range(0, flat.shape[0] // per_block, chunk):
        blocks = min(chunk, flat.shape[0] // per_block - first)
        start = tensor.offset + first * block_bytes
        raw = torch.frombuffer(bytearray(data[start : start + blocks * block_bytes]), dtype=torch.uint8)
        values = dequantize(tensor.kind, raw)
        if values is None:
            values = _dequantize_rare(raw.view(-1, block_bytes), tensor.kind, name, metadata)
        flat[first * per_block : (first + blocks) * per_block] = values.view(-1)
    return weight


def _num_bytes(tensor: GGUFTensor) -> int:
    per_block, block_bytes = TENSOR_BLOCKS[tensor.kind]
    return math.prod(tensor.dims) // per_block * block_bytes


def _ends_within(name: str, metadata: GGUFMetadata) -> ModelError:
    """The file was whole when its metadata were read."""
    return ModelError(f"{metadata.path}: ends within tensor {name}; fetch it again")


def _dequantize_rare(blocks: torch.Tensor, kind: int, name: str, metadata: GGUFMetadata) -> torch.Tensor:
    """Types that few files have: uint8 [N, bytes of a block] -> float32, by the gguf package, which is slower. Raises
    ModelError for a type that it does not read."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as dequantize_slowly

    try:
        values = dequantize_slowly(blocks.numpy(), GGMLQuantizationType(kind))
    except (ValueError, NotImplementedError) as error:  # no such type there; or no way to read it
        raise ModelError(
            f"{metadata.path}: tensor {name} of ggml type {kind} cannot be read: {str(error)[:200]}; fetch the "
            "model in another quantisation"
        ) from error
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """ggml pairs RoPE's halves next to each other; transformers keeps them apart. weight [heads * D, K]."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default
