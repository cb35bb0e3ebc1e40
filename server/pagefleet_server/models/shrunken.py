"""A model's own configuration, made so small that a self-test of it takes a second: same layers, fewer and narrower.

Nothing that decides *what* is computed changes: activations, norms, biases, sharing, patterns of layers, scales, sinks,
soft caps, tied weights. Widths keep their order (K wider than V stays so), counts keep their kind (multi-query stays
multi-query), windows become 32 tokens, and each kind of layer stays once or twice.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedConfig

WINDOW_TOKENS = 32
"""Every attention window longer than that becomes so long: a short text then reaches beyond it."""
VOCABULARY = 160
MAX_LAYERS = 12
HEADS = 4
HEAD_WIDTH = 16
"""Of the narrowest head that the model has."""
EXPERTS = 4

Values = dict[str, Any]

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
_OTHER_LAYERS = frozenset({"encoder_layers", "num_encoder_layers", "depth"})
_HEADS = frozenset(
    {
        "attention_heads",
        "decoder_attention_heads",
        "encoder_attention_heads",
        "n_head",
        "n_heads",
        "num_attention_heads",
        "num_attention_heads_per_layer",
        "num_decoder_attention_heads",
        "num_encoder_attention_heads",
        "num_heads",
        "swa_num_attention_heads",
    }
)
_KV_HEADS = frozenset({"num_global_key_value_heads", "num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"})
_HEAD_WIDTHS = frozenset(
    {
        "d_head",
        "dim_head",
        "global_head_dim",
        "head_dim",
        "kv_channels",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "swa_head_dim",
        "swa_v_head_dim",
        "v_head_dim",
    }
)
_HIDDEN = frozenset(
    {
        "d_model",
        "dim_model",
        "emb_dim",
        "embedding_size",
        "hidden_size",
        "input_embedding_size",
        "n_embd",
        "output_embedding_size",
        "word_embed_proj_dim",
    }
)
_FEED_FORWARD = frozenset(
    {"d_inner", "decoder_ffn_dim", "dff", "dim_ff", "encoder_ffn_dim", "expert_ffn_hidden_size", "feed_forward_size"}
    | {"ffn_dim", "ffn_hidden_size", "intermediate_size_mlp", "n_inner"}
)
"""Besides every name that holds "intermediate_size"."""
_EXPERTS = frozenset({"moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts", "zero_expert_num"})
_EXPERTS_PER_TOKEN = frozenset({"moe_k", "moe_topk", "num_experts_per_tok", "num_experts_per_token"})
_VOCABULARY = frozenset({"decoder_vocab_size", "unpadded_vocab_size", "vocab_size", "vocab_size_per_layer_input"})
_WINDOWS = frozenset(
    {
        "attention_chunk_size",
        "attention_window_size",
        "keep_window_size",
        "local_attention",
        "sliding_window",
        "sliding_window_size",
        "window_size",
    }
)
_BOUNDED = {
    "floor_scale": 16,
    "gated_norm_rank": 8,
    "hidden_size_per_layer_input": 8,
    "index_block_size": 8,
    "index_topk": 8,
    "index_topk_blocks": 2,
    "kv_lora_rank": 32,
    "laurel_rank": 8,
    "log_scaling_n_floor": 16,
    "n_group": 2,
    "num_expert_group": 2,
    "o_lora_rank": 32,
    "q_lora_rank": 32,
    "router_hidden_size": 32,
    "topk_group": 1,
}
"""Other widths and counts, and lengths from which on something changes: at most so much."""
_LAYER_SETS = frozenset({"cross_attention_layers", "full_attn_idxs", "mlp_only_layers", "moe_layers"})
"""Lists of layer indices."""
_FIRST_LAYERS = frozenset({"first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"})
"""Layers below it are of another kind."""
_LAST_LAYERS = frozenset({"num_kv_shared_layers"})
"""So many last layers are of another kind."""
_PERIODS = ("decoder_sparse_step", "global_attn_every_n_layers", "interleave_moe_layer_step", "moe_layer_interval")
"""Every n-th layer is of another kind."""


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """A new configuration of the same class. Raises whatever the class raises when the result is not one of its own."""
    values = config.to_dict()
    text = config.get_text_config(decoder=True)
    small = _shrink(values, depth=0) if text is config else _shrink_parts(values)
    small.pop("quantization_config", None)
    return type(config).from_dict(small)


def _shrink_parts(values: Values) -> Values:
    """A configuration of several models: each by itself; token ids that they share come into the small vocabulary."""
    return _token_ids({name: _shrink(v, depth=0) if _is_config(v) else v for name, v in values.items()})


def _is_config(value: object) -> bool:
    return isinstance(value, dict) and "model_type" in value


def _shrink(values: Values, *, depth: int) -> Values:
    """One model's values."""
    layers = kept_layers(values)
    small = _cut_layers(values, layers) if layers else dict(values)
    widths = _head_widths(values)
    small = {name: _small_value(name, value, values, widths) for name, value in small.items()}
    hidden = next((values[name] for name in ("hidden_size", "n_embd", "d_model") if _count(values.get(name))), None)
    if hidden is not None:
        head_width = widths.get("head_dim", HEAD_WIDTH)
        is_square = (values.get("head_dim") or hidden // _first_heads(values)) * _first_heads(values) == hidden
        width = HEADS * head_width if is_square else HEADS * head_width + 32
        small |= {name: width for name in _HIDDEN if _count(values.get(name))}
    if _count(values.get("qk_head_dim")):
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    if _count(values.get("rotary_dim")):
        small["rotary_dim"] = max(4, values["rotary_dim"] * HEAD_WIDTH // _widest(values) // 2 * 2)
    rope = small.get("rope_parameters")
    if isinstance(rope, dict):
        small["rope_parameters"] = _small_rope(rope, small)
    for name, value in small.items():
        if _is_config(value) and depth < 2:
            small[name] = _shrink(value, depth=depth + 1)
    return _token_ids(small)


def kept_layers(values: Mapping[str, Any]) -> list[int]:
    """Indices of the layers that stay, rising: the first two of each kind; at least two layers where there are two."""
    name = next((name for name in _LAYERS if _count(values.get(name))), None)
    if name is None:
        return []
    count = int(values[name])
    lists = [v for v in values.values() if isinstance(v, list) and len(v) == count]
    period = max((int(values[p]) for p in _PERIODS if _count(values.get(p))), default=1)
    groups: dict[str, list[int]] = {}
    for index in range(count):
        kind = [repr(v[index]) for v in lists]
        kind += [str(index < values[n]) for n in _FIRST_LAYERS if _count(values.get(n))]
        kind += [str(index >= count - values[n]) for n in _LAST_LAYERS if _count(values.get(n))]
        kind += [str(index in values[n]) for n in _LAYER_SETS if isinstance(values.get(n), list)]
        kind.append(repr(_per_layer(values).get(index)))
        groups.setdefault("|".join(kind), []).append(index)
    each = 2 if 2 * len(groups) <= MAX_LAYERS else 1
    kept = {index for members in groups.values() for index in members[:each]} | set(range(min(period, count, 8)))
    return sorted(kept)[:MAX_LAYERS]


def _per_layer(values: Mapping[str, Any]) -> dict[int, object]:
    found = values.get("per_layer_config")
    return {int(index): value for index, value in found.items()} if isinstance(found, dict) else {}


def _cut_layers(values: Values, kept: list[int]) -> Values:
    name = next(name for name in _LAYERS if _count(values.get(name)))
    count = int(values[name])

    def cut(key: str, value: Any) -> Any:
        if key == name:
            return len(kept)
        if key == "attention_types" and isinstance(value, list):
            return [[[item], 1] for item in (values["attention_layers"][index] for index in kept)]
        if key == "per_layer_config" and isinstance(value, dict):
            return {
                str(new).zfill(2): _per_layer(values)[old] for new, old in enumerate(kept) if old in _per_layer(values)
            }
        if key in _FIRST_LAYERS and _count(value):
            return sum(index < value for index in kept)
        if key in _LAST_LAYERS and _count(value):
            return sum(index >= count - value for index in kept)
        if key in _LAYER_SETS and isinstance(value, list):
            return [new for new, old in enumerate(kept) if old in value]
        if key == "moe_layer_end_index" and _count(value):
            return len(kept) - 1
        if isinstance(value, list) and len(value) == count:
            return [value[index] for index in kept]
        return value

    return {key: cut(key, value) for key, value in values.items()}


def _small_value(name: str, value: Any, values: Mapping[str, Any], widths: Mapping[str, int]) -> Any:
    if isinstance(value, list):
        return (
            [_small_value(name, item, values, widths) for item in value] if name in _HEADS else _small_list(name, value)
        )
    if name == "per_layer_config" and isinstance(value, dict):
        return {
            index: {key: _small_value(key, item, values, widths) for key, item in layer.items()}
            for index, layer in value.items()
        }
    if value is None and name == "num_key_value_heads":
        return HEADS  # what None means everywhere: one for each query head
    if not _count(value):
        return value
    if name in _HEADS:
        base = _first_heads(values)
        return HEADS if value == base else HEADS + 2 if value > base else HEADS - 2
    if name in _KV_HEADS:
        return 1 if value == 1 else HEADS if value == _first_heads(values) else 2
    if name in _HEAD_WIDTHS:
        return _width(value, values)
    if "intermediate_size" in name or name in _FEED_FORWARD:
        return 48 if name.startswith(("moe_", "expert_", "shared_")) else 96
    if name in _EXPERTS:
        return min(value, EXPERTS)
    if name in _EXPERTS_PER_TOKEN:
        return min(value, 2)
    if name in _VOCABULARY:
        return min(value, VOCABULARY)
    if name in _WINDOWS:
        return min(value, WINDOW_TOKENS)
    if name in _OTHER_LAYERS:
        return min(value, 2)
    return min(value, _BOUNDED[name]) if name in _BOUNDED else value


def _small_list(name: str, value: list[Any]) -> list[Any]:
    if "intermediate_size" in name:
        return [min(item, 96) for item in value]
    if name in _EXPERTS or name in _EXPERTS_PER_TOKEN:
        return [min(item, EXPERTS if name in _EXPERTS else 2) for item in value]
    return value


def _head_widths(values: Mapping[str, Any]) -> dict[str, int]:
    return {name: _width(values[name], values) for name in _HEAD_WIDTHS if _count(values.get(name))}


def _width(value: int, values: Mapping[str, Any]) -> int:
    """Widths keep their proportions, in steps of 8, up to fourfold."""
    narrowest = min(values[name] for name in _HEAD_WIDTHS if _count(values.get(name)))
    return int(min(max(HEAD_WIDTH * value // narrowest // 8 * 8, 8), 4 * HEAD_WIDTH))


def _widest(values: Mapping[str, Any]) -> int:
    """Width of a head of the large model."""
    hidden = next((values[name] for name in ("hidden_size", "n_embd", "d_model") if _count(values.get(name))), 64)
    return int(values.get("head_dim") or hidden // _first_heads(values))


def _first_heads(values: Mapping[str, Any]) -> int:
    names = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads")
    return next((int(values[name]) for name in names if _count(values.get(name))), HEADS)


def _small_rope(rope: Values, small: Values) -> Values:
    """Frequency tables cut to the new width; the lengths and factors stay."""
    if all(isinstance(value, dict) for value in rope.values()) and rope:
        return {kind: _small_rope(value, small) for kind, value in rope.items()}
    width = small.get("qk_rope_head_dim") or small.get("head_dim") or HEAD_WIDTH
    half = int(width * (rope.get("partial_rotary_factor") or 1.0)) // 2
    new = dict(rope)
    for name in ("short_factor", "long_factor"):
        if isinstance(rope.get(name), list):
            new[name] = (rope[name] * half)[:half]
    if rope.get("rope_type") in ("dynamic", "longrope") and _count(rope.get("original_max_position_embeddings")):
        # The server stays below it: beyond, one sequence's length changes its neighbours.
        new["original_max_position_embeddings"] = max(rope["original_max_position_embeddings"], 4096)
    if rope.get("llama_4_scaling_beta") is not None:  # queries grow from that length on
        new["original_max_position_embeddings"] = 16
    if isinstance(rope.get("mrope_section"), list):
        new["mrope_section"] = _split(half, rope["mrope_section"])
    return new


def _split(total: int, parts: Iterable[int]) -> list[int]:
    """`total` in the proportions of `parts`, the rest to the last."""
    parts = list(parts)
    cut = [max(1, total * part // sum(parts)) for part in parts]
    return [*cut[:-1], total - sum(cut[:-1])]


def _token_ids(values: Values) -> Values:
    """Ids of special tokens beyond the small vocabulary become small ones."""

    def small(name: str, value: Any) -> Any:
        if not name.endswith(("token_id", "token_index")):
            return value
        if isinstance(value, list):
            return [item % VOCABULARY if _count(item) else item for item in value]
        return value % VOCABULARY if _count(value) else value

    return {name: small(name, value) for name, value in values.items()}


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
