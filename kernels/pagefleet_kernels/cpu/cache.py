"""KV memory of one layer in the library's layout (src/layout.h)."""

from dataclasses import dataclass

import torch

from pagefleet_kernels.batch import KVShape

TILE_TOKENS = 16
LANES = 16


@dataclass(frozen=True, slots=True)
class CpuCache:
    """Words [num_blocks, block_words]: one float each, or two bf16; typed int32, so that no op takes it for numbers."""

    shape: KVShape
    block_size: int
    dtype: torch.dtype
    words: torch.Tensor

    @property
    def num_blocks(self) -> int:
        """Blocks including the null block."""
        return self.words.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.words.nbytes

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.words.device


def block_words(shape: KVShape, block_size: int, dtype: torch.dtype) -> int:
    """32-bit words of one block of one layer; V rows are padded to 16 words."""
    per_word = 4 // dtype.itemsize
    k_words = shape.head_dim // per_word
    v_words = -(-shape.v_head_dim // LANES) * LANES // per_word
    return shape.num_kv_heads * block_size * (k_words + v_words)


def why_unsupported(shape: KVShape, block_size: int, dtype: torch.dtype) -> str | None:
    """Why the library cannot hold such a layer, or None when it can."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the CPU kernels hold float32 and bfloat16, not {dtype}"
    if block_size % TILE_TOKENS:
        return f"the CPU kernels need a block size that is a multiple of {TILE_TOKENS}, not {block_size}"
    if shape.head_dim % (4 // dtype.itemsize):
        return f"the CPU kernels need an even head_dim in {dtype}, not {shape.head_dim}"
    return None
