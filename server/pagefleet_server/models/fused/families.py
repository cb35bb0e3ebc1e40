"""The table: architecture -> what it computes. One decoder serves all of it; a new architecture is a new row."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from pagefleet_server.models.eos import token_ids
from pagefleet_server.models.fused.config_reader import ConfigReader
from pagefleet_server.models.fused.rope_config import Ropes, one_rope, ropes_by_layer_type
from pagefleet_server.models.fused.spec import DecoderSpec, LayerTraits, NotFused

Windows = Callable[[ConfigReader, int], list[int | None]]
"""(configuration, layers) -> sliding window of each layer."""
ACTIVATIONS: Mapping[str, Literal["silu", "gelu_tanh"]] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
)


def no_window(config: ConfigReader, layers: int) -> list[int | None]:
    """Every layer sees all keys."""
    kinds = config.items("layer_types", str)
    if kinds is not None and set(kinds) != {"full_attention"}:
        raise NotFused(f"layer_types has {', '.join(sorted(set(kinds)))}")
    return [None] * layers


def one_window(config: ConfigReader, layers: int) -> list[int | None]:
    """sliding_window counts for every layer."""
    return [config.integer_or_none("sliding_window")] * layers


def switched_window(config: ConfigReader, layers: int) -> list[int | None]:
    """sliding_window counts with use_sliding_window: from max_window_layers on, or as layer_types says."""
    first = config.get("max_window_layers")
    window = config.integer_or_none("sliding_window")
    if not config.flag("use_sliding_window"):
        window = None
    kinds = config.items("layer_types", str)
    if kinds is None:
        if window is not None and (isinstance(first, bool) or not isinstance(first, int)):
            raise NotFused(f"max_window_layers is {first!r}")
        return [window if isinstance(first, int) and layer >= first else None for layer in range(layers)]
    return _by_type(kinds, window, layers)


def every_other_window(config: ConfigReader, layers: int) -> list[int | None]:
    """All layers but every n-th slide, n = sliding_window_pattern, or as layer_types says."""
    pattern = config.integer("sliding_window_pattern")
    kinds = config.items("layer_types", str)
    if kinds is None:
        kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]
    return _by_type(kinds, config.integer_or_none("sliding_window"), layers)


def nope_window(config: ConfigReader, layers: int) -> list[int | None]:
    """SmolLM3: layers without positions slide, where windows are used at all."""
    window = config.integer_or_none("sliding_window") if config.flag("use_sliding_window") else None
    config.get("sliding_window")
    kinds = config.items("layer_types", str)
    if kinds is None:
        return [None if turns else window for turns in _turning(config, layers)]
    return _by_type(kinds, window, layers)


def _by_type(kinds: list[str], window: int | None, layers: int) -> list[int | None]:
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise NotFused(f"layer_types has {len(kinds)} entries of {', '.join(sorted(set(kinds)))} for {layers} layers")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _turning(config: ConfigReader, layers: int) -> list[bool]:
    """SmolLM3: which layers turn."""
    interval = config.integer("no_rope_layer_interval")
    turning = config.items("no_rope_layers", int)
    if turning is None:
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(turning) < layers:
        raise NotFused(f"no_rope_layers has {len(turning)} entries for {layers} layers")
    return [bool(flag) for flag in turning[:layers]]


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture computes beyond a plain Llama, and the values of keys that its configurations leave out."""

    causal_class: str
    """`architectures` of a configuration that this row may serve."""
    defaults: Mapping[str, object]
    windows: Windows = no_window
    ropes: Callable[[ConfigReader, int], Ropes] = one_rope
    activation_key: str = "hidden_act"
    epsilon_key: str = "rms_norm_eps"
    bias_key: str | None = "attention_bias"
    """Says whether q, k, v and o have biases; None: see qkv_bias."""
    qkv_bias: bool = False
    """q, k and v always have biases."""
    mlp_bias_key: str | None = None
    centred_norm: bool = False
    norm_offset: float = 0.0
    pre_norm: bool = True
    post_norm: bool = False
    head_norm: bool = False
    width_norm: bool = False
    merged_weights: bool = False
    gated: bool = True
    scales_embedding: bool = False
    """By the root of hidden_size, rounded to the dtype."""
    is_gemma: bool = False
    """The score scale is query_pre_attn_scalar ** -0.5; final logits may be capped."""
    caps_scores: bool = False
    has_multipliers: bool = False
    """Granite's four."""
    has_nope_layers: bool = False


_COMMON: Mapping[str, object] = MappingProxyType(
    {"hidden_act": "silu", "rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False}
)
_GEMMA: Mapping[str, object] = MappingProxyType(
    {**_COMMON, "head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096}
    | {"eos_token_id": 1}
    | dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")
)
_QWEN: Mapping[str, object] = MappingProxyType(
    {**_COMMON, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
    | {"max_position_embeddings": 32768}
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            "LlamaForCausalLM",
            {**_COMMON, "max_position_embeddings": 2048, "eos_token_id": 2},
            mlp_bias_key="mlp_bias",
        ),
        "mistral": Family(
            "MistralForCausalLM",
            {**_COMMON, "num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}
            | {"eos_token_id": 2},
            windows=one_window,
            bias_key=None,
        ),
        "qwen2": Family("Qwen2ForCausalLM", _QWEN, windows=switched_window, bias_key=None, qkv_bias=True),
        "qwen3": Family("Qwen3ForCausalLM", {**_QWEN, "head_dim": 128}, windows=switched_window, head_norm=True),
        "smollm3": Family(
            "SmolLM3ForCausalLM",
            {**_COMMON, "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2000000.0}
            | {"no_rope_layer_interval": 4, "tie_word_embeddings": True, "eos_token_id": 128001},
            windows=nope_window,
            mlp_bias_key="mlp_bias",
            has_nope_layers=True,
        ),
        "phi3": Family(
            "Phi3ForCausalLM",
            {**_COMMON, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
            | {"original_max_position_embeddings": 4096, "eos_token_id": 32000},
            windows=one_window,
            bias_key=None,
            merged_weights=True,
        ),
        "gemma": Family(
            "GemmaForCausalLM",
            {**_COMMON, "num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True}
            | {"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "eos_token_id": 1},
            norm_offset=1.0,
            scales_embedding=True,
        ),
        "gemma2": Family(
            "Gemma2ForCausalLM",
            {**_GEMMA, "num_key_value_heads": 4, "max_position_embeddings": 8192, "sliding_window_pattern": 2}
            | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
            windows=every_other_window,
            activation_key="hidden_activation",
            norm_offset=1.0,
            post_norm=True,
            scales_embedding=True,
            is_gemma=True,
            caps_scores=True,
        ),
        "gemma3_text": Family(
            "Gemma3ForCausalLM",
            {**_GEMMA, "num_key_value_heads": 4, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
            windows=every_other_window,
            ropes=ropes_by_layer_type,
            activation_key="hidden_activation",
            norm_offset=1.0,
            post_norm=True,
            head_norm=True,
            scales_embedding=True,
            is_gemma=True,
        ),
        "olmo2": Family(
            "Olmo2ForCausalLM",
            {**_COMMON, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "eos_token_id": 50279},
            pre_norm=False,
            post_norm=True,
            width_norm=True,
        ),
        "granite": Family(
            "GraniteForCausalLM",
            {**_COMMON, "max_position_embeddings": 2048, "eos_token_id": 2}
            | dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0)
            | {"attention_multiplier": 1.0},
            mlp_bias_key="mlp_bias",
            has_multipliers=True,
        ),
        "starcoder2": Family(
            "Starcoder2ForCausalLM",
            {**_COMMON, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 2, "norm_epsilon": 1e-5}
            | {"max_position_embeddings": 4096, "use_bias": True, "tie_word_embeddings": True}
            | {"initializer_range": 0.018042, "eos_token_id": 50256},
            windows=one_window,
            epsilon_key="norm_epsilon",
            bias_key="use_bias",
            mlp_bias_key="use_bias",
            centred_norm=True,
            gated=False,
        ),
    }
)
"""model_type -> row."""


def read_spec(values: Mapping[str, object]) -> DecoderSpec:
    """config.json's values -> the decoder. Raises NotFused with the trait that is not in the table."""
    model_type = values.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or not isinstance(model_type, str):
        raise NotFused(f"{model_type} is not in its table")
    config = ConfigReader(values, family.defaults)
    config.get("model_type")
    classes = config.items("architectures", str)
    if classes and classes != [family.causal_class]:
        raise NotFused(f"it is a {', '.join(classes)}")
    layers, heads = config.integer("num_hidden_layers"), config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    head_dim = config.integer_or_none("head_dim") or hidden // heads
    kv_heads = config.integer_or_none("num_key_value_heads") or heads
    activation = config.text(family.activation_key)
    if family.scales_embedding:
        if activation == "gelu":
            activation = "gelu_pytorch_tanh"  # what the oldest files of these architectures mean by it
        others = {config.get("hidden_act"), config.get("hidden_activation")} - {None, "gelu", activation}
        if others:
            raise NotFused(f"its activation is {activation} and {', '.join(map(str, others))}")
    if activation not in ACTIVATIONS:
        raise NotFused(f"its activation is {activation}")
    if heads % kv_heads:
        raise NotFused(f"{heads} query heads do not divide among {kv_heads} kv heads")
    bias = config.flag(family.bias_key) if family.bias_key is not None else False
    windows = family.windows(config, layers)
    turning = _turning(config, layers) if family.has_nope_layers else [True] * layers
    ropes = family.ropes(config, head_dim)
    if config.flag("use_bidirectional_attention"):
        raise NotFused("its tokens attend to later ones")
    spec = DecoderSpec(
        architecture=model_type,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(
            LayerTraits(ropes.of(window) if turns else None, window)
            for window, turns in zip(windows, turning, strict=True)
        ),
        max_positions=ropes.max_positions,
        epsilon=config.number(family.epsilon_key),
        centred_norm=family.centred_norm,
        norm_offset=family.norm_offset,
        pre_norm=family.pre_norm,
        post_norm=family.post_norm,
        head_norm=family.head_norm,
        width_norm=family.width_norm,
        merged_weights=family.merged_weights,
        gated=family.gated,
        qkv_bias=bias or family.qkv_bias,
        output_bias=bias,
        mlp_bias=config.flag(family.mlp_bias_key) if family.mlp_bias_key is not None else False,
        activation=ACTIVATIONS[activation],
        score_scale=_score_scale(family, config, head_dim),
        score_softcap=config.number_or_none("attn_logit_softcapping") if family.caps_scores else None,
        embedding_scale=_embedding_scale(family, config, hidden),
        rounds_embedding_scale=family.scales_embedding,
        residual_scale=config.number("residual_multiplier") if family.has_multipliers else 1.0,
        logits_divisor=config.number("logits_scaling") if family.has_multipliers else 1.0,
        logits_softcap=config.number_or_none("final_logit_softcapping") if family.is_gemma else None,
        tied=config.flag("tie_word_embeddings"),
        eos_token_ids=token_ids(config.get("eos_token_id")),
        initializer_range=config.number("initializer_range"),
    )
    config.finish()
    return spec


def _score_scale(family: Family, config: ConfigReader, head_dim: int) -> float:
    if family.is_gemma:
        return 1.0 / math.sqrt(config.number("query_pre_attn_scalar"))
    if family.has_multipliers:
        return config.number("attention_multiplier")
    return 1.0 / math.sqrt(head_dim)


def _embedding_scale(family: Family, config: ConfigReader, hidden_size: int) -> float:
    if family.has_multipliers:
        return config.number("embedding_multiplier")
    return math.sqrt(hidden_size) if family.scales_embedding else 1.0
