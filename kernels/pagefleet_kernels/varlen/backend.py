"""The adapter: our batches in torch's terms.

num_splits is 1: torch's paged split-KV gives wrong rows (pytorch issue 194167), and one split is the same in any batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pagefleet_kernels.backend import KVCache
from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.checks import refuse

BLOCK_MULTIPLE = 256
"""FlashAttention-2's pages."""
DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, eq=False)
class VarlenCache:
    """Keys and values [num_blocks + 1, block_size, Hkv, D], both contiguous; the last block takes what has no slot."""

    shape: KVShape
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def num_blocks(self) -> int:
        """Blocks including the null block."""
        return self.keys.shape[0] - 1

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.keys.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """What is stored."""
        return self.keys.dtype

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.keys.device


class VarlenBackend:
    """See backend.Backend. attend: torch.nn.attention.varlen.varlen_attn."""

    name = "varlen"

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        self._attend = attend

    def allocate(
        self, shape: KVShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> VarlenCache:
        """Zeroed KV memory of one layer; 16-bit floats, equal widths of K and V, blocks of a multiple of 256."""
        _check(shape, block_size, dtype)
        size = (num_blocks + 1, block_size, shape.num_kv_heads, shape.head_dim)
        return VarlenCache(
            shape=shape,
            keys=torch.zeros(size, dtype=dtype, device=device),
            values=torch.zeros(size, dtype=dtype, device=device),
        )

    def bytes_per_block(self, shape: KVShape, *, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block of one layer; there is no padding."""
        _check(shape, block_size, dtype)
        return shape.num_kv_heads * block_size * (shape.head_dim + shape.v_head_dim) * dtype.itemsize

    def write_kv(self, cache: KVCache, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store rows at their slots."""
        own = _own(cache)
        # Rows without a slot are written too, where nobody reads: no shape depends on values, so graphs can hold it.
        slots = torch.where(slot_mapping < 0, own.num_blocks * own.block_size, slot_mapping)
        own.keys.flatten(0, 1).index_copy_(0, slots, key)
        own.values.flatten(0, 1).index_copy_(0, slots, value)

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
        own = _own(cache)
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
        # Rows of padding see no key: the kernel's word for that is not in its contract, ours is zero.
        padding = (batch.seq_lens <= 0).repeat_interleave(batch.query_starts.diff(), output_size=query.shape[0])
        return out.masked_fill(padding[:, None, None], 0.0)

    def copy_blocks(self, cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks."""
        own = _own(cache)
        sources, destinations = torch.tensor(pairs, device=own.device).unbind(1)
        own.keys.index_copy_(0, destinations, own.keys.index_select(0, sources))
        own.values.index_copy_(0, destinations, own.values.index_select(0, sources))


def _check(shape: KVShape, block_size: int, dtype: torch.dtype) -> None:
    """Refuse what FlashAttention does not hold."""
    if block_size % BLOCK_MULTIPLE:
        raise refuse("block_size", block_size, f"a multiple of {BLOCK_MULTIPLE} for this backend")
    if dtype not in DTYPES:
        raise refuse("dtype", dtype, f"one of {', '.join(str(known) for known in DTYPES)} for this backend")
    if shape.head_dim != shape.v_head_dim or shape.head_dim > MAX_HEAD_DIM or shape.head_dim % 8:
        found = f"{shape.head_dim} and v_head_dim {shape.v_head_dim}"
        raise refuse("shape.head_dim", found, f"equal, a multiple of 8 and <= {MAX_HEAD_DIM} for this backend")


def _own(cache: KVCache) -> VarlenCache:
    if not isinstance(cache, VarlenCache):
        raise refuse("cache", f"a {type(cache).__name__}", "one that this backend allocated (VarlenCache)")
    return cache
