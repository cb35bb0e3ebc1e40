"""KV memory of one layer: heads outermost, so that a gathered sequence is one contiguous [L, D] matrix per head."""

from dataclasses import dataclass

import torch

from pagefleet_kernels.batch import KVShape


@dataclass(frozen=True, slots=True)
class ReferenceCache:
    """Keys [Hkv, num_blocks, block_size, D] and values [Hkv, num_blocks, block_size, Dv], both contiguous."""

    shape: KVShape
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def num_blocks(self) -> int:
        """Blocks including the null block."""
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.keys.shape[2]

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

    def gather(self, block_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """int [S, N] -> keys [Hkv, S, N * block_size, D] and values [Hkv, S, N * block_size, Dv], converted."""
        num_seqs, blocks = block_ids.shape
        flat = block_ids.reshape(-1)
        form = (self.shape.num_kv_heads, num_seqs, blocks * self.block_size, -1)
        keys = self.keys.index_select(1, flat).view(form)
        values = self.values.index_select(1, flat).view(form)
        return keys.to(dtype), values.to(dtype)
