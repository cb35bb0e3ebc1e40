"""The adapter: our batches in torch's terms.

num_splits is 1: torch's paged split-KV gives wrong rows (pytorch issue 194167), and one split is the same in any batch.
"""

from collections.abc import Callable

import torch

from pagefleet_kernels.backend import KVCache
from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.checks import refuse
from pagefleet_kernels.nhd_cache import NhdCache, NhdStore, is_padding

BLOCK_MULTIPLE = 256
"""FlashAttention-2's pages."""
DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


class VarlenBackend(NhdStore):
    """See backend.Backend. attend: torch.nn.attention.varlen.varlen_attn."""

    name = "varlen"

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        self._attend = attend

    def check(self, shape: KVShape, block_size: int, dtype: torch.dtype) -> None:
        """Refuse what FlashAttention does not hold."""
        if block_size % BLOCK_MULTIPLE:
            raise refuse("block_size", block_size, f"a multiple of {BLOCK_MULTIPLE} for this backend")
        if dtype not in DTYPES:
            raise refuse("dtype", dtype, f"one of {', '.join(str(known) for known in DTYPES)} for this backend")
        if shape.head_dim != shape.v_head_dim or shape.head_dim > MAX_HEAD_DIM or shape.head_dim % 8:
            found = f"{shape.head_dim} and v_head_dim {shape.v_head_dim}"
            raise refuse("shape.head_dim", found, f"equal, a multiple of 8 and <= {MAX_HEAD_DIM} for this backend")

    def paged_attention(
        self,
        query: torch.Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention; softcap and sinks are refused."""
        own = NhdCache.own(cache)
        if softcap is not None:
            raise refuse("softcap", softcap, "None for this backend")
        if sinks is not None:
            raise refuse("sinks", "given", "None for this backend")
        # Left of a row's own position it sees sliding_window - 1 keys; (-1, 0) is all of them.
        left = -1 if sliding_window is None else sliding_window - 1
        out = self._attend(
            query,
            own.keys,
            own.values,
            batch.query_starts,
            None,
            max(1, batch.max_query_len),
            max(1, batch.max_seq_len),
            scale=scale,
            window_size=(left, 0),
            enable_gqa=query.shape[1] != own.shape.num_kv_heads,
            seqused_k=batch.seq_lens,
            block_table=batch.block_tables,
            num_splits=1,
        )
        padding = is_padding(batch.seq_lens, batch.query_starts, query.shape[0])
        return out.masked_fill(padding[:, None, None], 0.0)
