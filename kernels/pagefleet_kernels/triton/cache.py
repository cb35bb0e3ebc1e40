"""KV memory of one layer on a GPU.

    memory [num_blocks, row]      one row per block, so that a block is one contiguous copy
    row = | keys: block_size x Hkv x D | values: block_size x Hkv x Dv |        (NHD; padded to 16 bytes)

Kernels take strides, so nothing else depends on this order. Any other order of blocks, tokens and heads works too.
"""

from dataclasses import dataclass

import torch

from pagefleet_kernels.backend import KVCache
from pagefleet_kernels.batch import KVShape
from pagefleet_kernels.checks import refuse

FP8 = torch.float8_e4m3fn
ALIGNMENT_BYTES = 16
"""Rows start at multiples of it, so that loads are 128 bits wide."""


def row_elements(shape: KVShape, block_size: int, dtype: torch.dtype) -> int:
    """Elements of one block of one layer, padding included."""
    elements = block_size * shape.num_kv_heads * (shape.head_dim + shape.v_head_dim)
    unit = ALIGNMENT_BYTES // dtype.itemsize
    return -(-elements // unit) * unit


def kv_views(memory: torch.Tensor, shape: KVShape, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """memory [num_blocks, row] -> keys [num_blocks, block_size, Hkv, D], values [num_blocks, block_size, Hkv, Dv]."""
    num_blocks, row = memory.shape
    heads, width, v_width = shape.num_kv_heads, shape.head_dim, shape.v_head_dim
    keys = memory.as_strided((num_blocks, block_size, heads, width), (row, heads * width, width, 1))
    values = memory.as_strided(
        (num_blocks, block_size, heads, v_width), (row, heads * v_width, v_width, 1), block_size * heads * width
    )
    return keys, values


@dataclass(frozen=True, slots=True, eq=False)
class TritonCache:
    """See the module. `keys` and `values` are views into `memory`."""

    shape: KVShape
    block_size: int
    memory: torch.Tensor
    """[num_blocks, row], the storage dtype."""
    keys: torch.Tensor
    """[num_blocks, block_size, Hkv, D]."""
    values: torch.Tensor
    """[num_blocks, block_size, Hkv, Dv]."""
    key_scales: torch.Tensor | None
    """fp32 [Hkv] for fp8 storage: a key is stored value x scale. Overwrite in place with calibrated scales before the
    first write; 1 by default. None for other dtypes."""
    value_scales: torch.Tensor | None

    @property
    def num_blocks(self) -> int:
        """Blocks including the null block."""
        return self.memory.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.memory.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """What is stored."""
        return self.memory.dtype

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.memory.device


def allocate(
    shape: KVShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> TritonCache:
    """Zeroed memory."""
    row = row_elements(shape, block_size, dtype)
    # torch.zeros fills fp8 through its bytes on some devices only; the bits of 0 are the same everywhere.
    memory = torch.zeros(num_blocks, row * dtype.itemsize, dtype=torch.uint8, device=device).view(dtype)
    keys, values = kv_views(memory, shape, block_size)
    scales = [torch.ones(shape.num_kv_heads, device=device) if dtype == FP8 else None for _ in range(2)]
    return TritonCache(
        shape=shape,
        block_size=block_size,
        memory=memory,
        keys=keys,
        values=values,
        key_scales=scales[0],
        value_scales=scales[1],
    )


def own_cache(cache: KVCache) -> TritonCache:
    """The cache as this backend's. Raises KernelArgumentError for another's."""
    if not isinstance(cache, TritonCache):
        raise refuse("cache", f"a {type(cache).__name__}", "one that this backend allocated (TritonCache)")
    return cache
