"""The Triton backend: `backend.Backend`, and the fused neighbours that a decoder may call instead of its own code."""

import os
from collections.abc import Sequence

import torch

from pagefleet_kernels.backend import KVCache
from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.checks import refuse
from pagefleet_kernels.errors import BackendUnavailable
from pagefleet_kernels.sampling_batch import SamplingBatch
from pagefleet_kernels.triton import library as _library  # noqa: F401  registers torch.ops.pagefleet
from pagefleet_kernels.triton.attention import SPLIT_BUCKETS
from pagefleet_kernels.triton.cache import FP8, TritonCache, allocate, own_cache, row_elements
from pagefleet_kernels.triton.configs import DECODE_SPLIT
from pagefleet_kernels.triton.door import FLOATS, check_gate, check_norm, check_rope, check_sampling
from pagefleet_kernels.triton.program import TritonProgram

STORAGE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, FP8)
FP8_CAPABILITY = (8, 9)
"""The first devices that convert fp8 e4m3 in hardware."""


class TritonBackend:
    """See backend.Backend. Keeps no state; every method enqueues work on the current stream and waits for nothing."""

    name = "triton"

    def allocate(
        self, shape: KVShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> TritonCache:
        """Zeroed KV memory of one layer. fp8 e4m3 storage serves queries, keys and values of any float dtype."""
        if dtype not in STORAGE_DTYPES:
            raise refuse("dtype", dtype, f"one of {', '.join(str(known) for known in STORAGE_DTYPES)}")
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise BackendUnavailable(f"Triton's kernels compute nothing on {device}")
        if dtype == FP8 and device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            if (major, minor) < FP8_CAPABILITY:
                raise BackendUnavailable(
                    f"compute capability {major}.{minor} converts no fp8 in hardware (from 8.9 on: L4, L40S, H100)"
                )
        return allocate(shape, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device)

    def bytes_per_block(self, shape: KVShape, *, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block of one layer, padding included."""
        return row_elements(shape, block_size, dtype) * dtype.itemsize

    def write_kv(self, cache: KVCache, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store rows at their slots."""
        own = own_cache(cache)
        torch.ops.pagefleet.write_kv(
            own.memory, *_geometry(own), own.key_scales, own.value_scales, key, value, slot_mapping
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
        """Causal attention; decode rows by split-KV, the others by tiles of packed query heads."""
        own = own_cache(cache)
        out: torch.Tensor = torch.ops.pagefleet.paged_attention(
            query,
            own.memory,
            *_geometry(own),
            own.key_scales,
            own.value_scales,
            batch.query_starts,
            batch.seq_lens,
            batch.block_tables,
            sinks,
            batch.num_decodes,
            batch.max_query_len,
            batch.max_seq_len,
            scale,
            sliding_window or 0,
            softcap or 0.0,
        )
        return out

    def copy_blocks(self, cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all pairs in one launch."""
        own = own_cache(cache)
        on_device = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).to(own.device, non_blocking=True)
        torch.ops.pagefleet.copy_blocks(own.memory, on_device)

    def rope_write_kv(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        *,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        interleaved: bool = False,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        epsilon: float = 1e-6,
    ) -> torch.Tensor:
        """Turn query [T, Hq, D] and key [T, Hkv, D], store key and value [T, Hkv, Dv]; returns the turned query.

        One launch that reads q, k, v once, instead of two rotations, two concatenations and a write. positions int64
        [T] are rows of cos_sin, fp32 [positions, R]: cosines then sines; columns >= R pass through. query_norm and
        key_norm [D]: RMS norms per head before the rotation. Rows with slot -1 are turned, not stored; rows whose
        position is outside cos_sin become NaN.
        """
        own = own_cache(cache)
        check_rope(
            query,
            key,
            value,
            own,
            slot_mapping=slot_mapping,
            positions=positions,
            cos_sin=cos_sin,
            query_norm=query_norm,
            key_norm=key_norm,
        )
        turned: torch.Tensor = torch.ops.pagefleet.rope_write_kv(
            query,
            key,
            value,
            own.memory,
            *_geometry(own),
            own.key_scales,
            own.value_scales,
            slot_mapping,
            positions,
            cos_sin,
            interleaved,
            query_norm,
            key_norm,
            epsilon,
        )
        return turned

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        *,
        epsilon: float,
        weight_offset: float = 0.0,
    ) -> torch.Tensor:
        """RMS norm over the last dimension of h = x + residual [T, N], times (weight [N] + weight_offset).

        residual becomes h, rounded to its dtype; None: h = x. weight_offset 1 is Gemma's.
        """
        check_norm(x, residual, weight)
        normed: torch.Tensor
        if residual is None:
            normed = torch.ops.pagefleet.rms_norm(x, weight, epsilon, weight_offset)
        else:
            normed = torch.ops.pagefleet.add_rms_norm(x, residual, weight, epsilon, weight_offset)
        return normed

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, 2 N] -> silu(x[:, :N]) * x[:, N:], [T, N]."""
        check_gate(x)
        out: torch.Tensor = torch.ops.pagefleet.silu_mul(x)
        return out

    def program(self, *, dtype: torch.dtype, device: torch.device, max_rows: int) -> TritonProgram:
        """An empty program; see TritonProgram. Raises BackendUnavailable for rows of another dtype."""
        if dtype not in FLOATS:
            raise BackendUnavailable(f"the Triton kernels compute no rows in {dtype}")
        return TritonProgram(self, dtype=dtype, device=device, max_rows=max_rows)

    def capture_lengths(self, longest: int) -> tuple[int, ...]:
        """Where the number of split-KV programs changes; see attention.decode_slots."""
        ends = (DECODE_SPLIT * bucket for bucket in SPLIT_BUCKETS[:-1])
        return (*(end for end in ends if end < longest), longest)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """logits [B, V] -> tokens int64 [B]; a draw depends on (seed, position) and its own row only."""
        check_sampling(logits, batch)
        penalties = batch.penalties
        tokens: torch.Tensor = torch.ops.pagefleet.sample(
            logits,
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.min_p,
            batch.seeds,
            batch.positions,
            penalties.repetition if penalties else None,
            penalties.presence if penalties else None,
            penalties.frequency if penalties else None,
            penalties.output_counts if penalties else None,
            penalties.prompt_seen if penalties else None,
        )
        return tokens


def _geometry(cache: TritonCache) -> tuple[int, int, int, int]:
    shape = cache.shape
    return cache.block_size, shape.num_kv_heads, shape.head_dim, shape.v_head_dim
