"""What the layers of a model look like to attention and its cache."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer's KV cache must hold, and what its attention does."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of a K row, elements."""
    v_head_dim: int
    sliding_window: int | None
