"""What one step's attention works on: value objects shared by every backend."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVShape:
    """One layer's KV heads. Layers of one model may differ (per-layer head sizes, V narrower than K)."""

    num_kv_heads: int
    head_dim: int
    """Width of a K row, elements."""
    v_head_dim: int
    """Width of a V row, elements."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The rows of one step, flattened: T query rows of S sequences; sequence s owns rows
    [query_starts[s], query_starts[s + 1]). Decode sequences (one row each) come first.

    Row r of sequence s sits at position seq_lens[s] - (query_starts[s + 1] - r) and sees keys at positions <= its own.
    """

    query_starts: torch.Tensor
    """int32 [S + 1], non-decreasing, from 0 to T. Equal neighbours are an empty sequence."""
    seq_lens: torch.Tensor
    """int32 [S]: tokens in the cache once this step's rows are written. 0 for padding."""
    block_tables: torch.Tensor
    """int32 [S, max_blocks]: block ids by position // block_size; entries past the sequence's end are never read."""
    slot_mapping: torch.Tensor
    """int64 [T]: block_id * block_size + offset where the row's K and V go; -1 writes nothing (padding)."""
    num_decodes: int
    """Sequences [0, num_decodes) have exactly one row; so rows [0, num_decodes) are theirs."""
    max_query_len: int
    max_seq_len: int
