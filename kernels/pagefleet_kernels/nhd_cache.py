"""KV memory as attention libraries read it: pages of tokens of heads. Written and copied by plain torch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagefleet_kernels.backend import KVCache
from pagefleet_kernels.batch import KVShape
from pagefleet_kernels.checks import refuse


@dataclass(frozen=True, slots=True, eq=False)
class NhdCache:
    """Keys and values [num_blocks + 1, block_size, Hkv, D], both contiguous; the last block takes what has no slot."""

    shape: KVShape
    keys: torch.Tensor
    values: torch.Tensor

    @staticmethod
    def zeros(
        shape: KVShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> "NhdCache":
        """Memory for num_blocks blocks, the null block included; widths of K and V are equal."""
        size = (num_blocks + 1, block_size, shape.num_kv_heads, shape.head_dim)
        keys, values = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
        return NhdCache(shape=shape, keys=keys, values=values)

    @staticmethod
    def own(cache: KVCache) -> "NhdCache":
        """The cache as this one. Raises KernelArgumentError for another backend's."""
        if not isinstance(cache, NhdCache):
            raise refuse("cache", f"a {type(cache).__name__}", "one that this backend allocated (NhdCache)")
        return cache

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

    def write(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store rows at their slots."""
        # Rows without a slot are written too, where nobody reads: no shape depends on values, so graphs can hold it.
        slots = torch.where(slot_mapping < 0, self.num_blocks * self.block_size, slot_mapping)
        self.keys.flatten(0, 1).index_copy_(0, slots, key)
        self.values.flatten(0, 1).index_copy_(0, slots, value)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) each."""
        sources, destinations = torch.tensor(pairs, device=self.device).unbind(1)
        self.keys.index_copy_(0, destinations, self.keys.index_select(0, sources))
        self.values.index_copy_(0, destinations, self.values.index_select(0, sources))


class NhdStore(ABC):
    """What backends on such memory share: everything but attention itself (see backend.Backend)."""

    @abstractmethod
    def check(self, shape: KVShape, block_size: int, dtype: torch.dtype) -> None:
        """Raises KernelArgumentError for a layer that the library does not hold; widths of K and V are equal."""

    def allocate(
        self, shape: KVShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> NhdCache:
        """Zeroed KV memory of one layer."""
        self.check(shape, block_size, dtype)
        return NhdCache.zeros(shape, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device)

    def bytes_per_block(self, shape: KVShape, *, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block of one layer; there is no padding."""
        self.check(shape, block_size, dtype)
        return shape.num_kv_heads * block_size * (shape.head_dim + shape.v_head_dim) * dtype.itemsize

    def write_kv(self, cache: KVCache, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store rows at their slots."""
        NhdCache.own(cache).write(key, value, slot_mapping)

    def copy_blocks(self, cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks."""
        NhdCache.own(cache).copy(pairs)


def is_padding(seq_lens: torch.Tensor, query_starts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """bool [T]: rows of sequences of length 0. What a library makes of them is not in its contract; ours is zero."""
    return (seq_lens <= 0).repeat_interleave(query_starts.diff(), output_size=num_rows)
