"""What a decoder computes, read from a configuration once: everything that differs between the architectures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pagefleet_server.models.layer_spec import LayerSpec


class NotFused(Exception):
    """The fused decoder does not compute such a model; the message says which trait it lacks."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of one or more layers."""

    kind: str
    """default, linear, dynamic, yarn, longrope or llama3: see rope.py."""
    theta: float
    rotary_dim: int
    """Leading elements of a head that turn; even."""
    parameters: Mapping[str, object] = field(hash=False)
    """The configuration's own, with original_max_position_embeddings and max_position_embeddings filled in."""


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """What differs between the layers of one model."""

    rope: RopeSpec | None
    """None: positions do not enter (NoPE)."""
    sliding_window: int | None
    """Keys k with position - k < window are seen; None: all."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A model's shape and traits."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerTraits, ...]
    max_positions: int
    """Tokens of one sequence at most."""
    epsilon: float
    centred_norm: bool
    """LayerNorm with bias instead of RMS norm."""
    norm_offset: float
    """Added to norm weights: 1 where the checkpoint holds weight - 1."""
    pre_norm: bool
    """Norms in front of attention and MLP."""
    post_norm: bool
    """Norms of their results, before they are added."""
    head_norm: bool
    """Query and key heads are normed one by one."""
    width_norm: bool
    """Query and key are normed over all heads."""
    merged_weights: bool
    """The checkpoint holds q, k, v (and gate, up) in one matrix."""
    gated: bool
    """activation(gate) * up; else activation(up)."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    activation: Literal["silu", "gelu_tanh"]
    score_scale: float
    score_softcap: float | None
    embedding_scale: float
    rounds_embedding_scale: bool
    """The scale is rounded to the model's dtype before it is used."""
    residual_scale: float
    """Of attention's and the MLP's results, before they are added."""
    logits_divisor: float
    logits_softcap: float | None
    tied: bool
    """The output layer is the embedding."""
    eos_token_ids: tuple[int, ...]
    """Of the configuration."""
    initializer_range: float
    """Of random weights."""

    @property
    def q_width(self) -> int:
        """Elements of a query row."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of a key row, and of a value row."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """What the KV cache must hold, by layer."""
        return tuple(
            LayerSpec(
                num_q_heads=self.num_q_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                v_head_dim=self.head_dim,
                sliding_window=layer.sliding_window,
            )
            for layer in self.layers
        )
