"""The plain torch backend."""

from collections.abc import Sequence

import torch

from pagefleet_kernels.backend import KVCache
from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.checks import QUANTISED_KV_DTYPES, refuse
from pagefleet_kernels.errors import BackendUnavailable
from pagefleet_kernels.reference.attention import AttentionRule, paged_attention
from pagefleet_kernels.reference.cache import ReferenceCache


class ReferenceBackend:
    """See backend.Backend. Keeps no state."""

    name = "reference"

    def allocate(
        self, shape: KVShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> ReferenceCache:
        """Zeroed KV memory of one layer. Raises BackendUnavailable for quantised KV, which it does not hold."""
        _check_dtype(dtype)
        form = (shape.num_kv_heads, num_blocks, block_size)
        return ReferenceCache(
            shape=shape,
            keys=torch.zeros(*form, shape.head_dim, dtype=dtype, device=device),
            values=torch.zeros(*form, shape.v_head_dim, dtype=dtype, device=device),
        )

    def bytes_per_block(self, shape: KVShape, *, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block of one layer; there is no padding."""
        _check_dtype(dtype)
        return shape.num_kv_heads * block_size * (shape.head_dim + shape.v_head_dim) * dtype.itemsize

    def write_kv(self, cache: KVCache, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store rows at their slots."""
        own = _own(cache)
        valid = slot_mapping >= 0
        if not bool(valid.all()):
            key, value, slot_mapping = key[valid], value[valid], slot_mapping[valid]
        own.keys.view(own.shape.num_kv_heads, -1, own.shape.head_dim).index_copy_(1, slot_mapping, key.transpose(0, 1))
        own.values.view(own.shape.num_kv_heads, -1, own.shape.v_head_dim).index_copy_(
            1, slot_mapping, value.transpose(0, 1)
        )

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
        """Causal attention, see attention.py."""
        rule = AttentionRule(scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks)
        return paged_attention(query, _own(cache), batch, rule)

    def copy_blocks(self, cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks."""
        own = _own(cache)
        sources, destinations = torch.tensor(pairs, device=own.device).unbind(1)
        own.keys.index_copy_(1, destinations, own.keys.index_select(1, sources))
        own.values.index_copy_(1, destinations, own.values.index_select(1, sources))


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype in QUANTISED_KV_DTYPES:
        raise BackendUnavailable(f"plain torch holds no KV in {dtype}")


def _own(cache: KVCache) -> ReferenceCache:
    if not isinstance(cache, ReferenceCache):
        raise refuse("cache", f"a {type(cache).__name__}", "one that this backend allocated (ReferenceCache)")
    return cache
