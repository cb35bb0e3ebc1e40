"""The CPU backend: arguments into the library's calls."""

import ctypes
import mmap
from collections.abc import Sequence

import torch

from pagefleet_kernels.backend import KVCache, LinearFunction
from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.checks import check_positive
from pagefleet_kernels.cpu.cache import CpuCache, block_words, why_unsupported
from pagefleet_kernels.cpu.calls import DTYPE_CODES, AttentionCall, RopeCall, WriteCall
from pagefleet_kernels.cpu.isa import cpu_flags
from pagefleet_kernels.cpu.library import Library
from pagefleet_kernels.cpu.linear import PackedLinear
from pagefleet_kernels.cpu.linear_grouped import GroupedLinear
from pagefleet_kernels.cpu.onednn import OneDnnPacker
from pagefleet_kernels.cpu.program import CpuProgram
from pagefleet_kernels.cpu.row_ops import CpuRowOps, check_rope
from pagefleet_kernels.errors import BackendUnavailable, KernelArgumentError
from pagefleet_kernels.grouped import GroupedWeight

_CPU = torch.device("cpu")


class CpuBackend:
    """See backend.Backend. Holds the library and a thread count, no other state.

    One row, one arithmetic: a row's result depends on its query, its keys and values and the layer's rule alone: not on
    its neighbours in the batch, nor on whether it came as a decode or inside a prompt chunk, nor on the threads.
    """

    name = "cpu"

    def __init__(self, library: Library, *, num_threads: int | None = None) -> None:
        """num_threads: at most so many threads a call; None follows torch.get_num_threads()."""
        if num_threads is not None:
            check_positive("num_threads", num_threads)
        self.library = library
        self._num_threads = num_threads
        self.row_ops = CpuRowOps(library, lambda: self.num_threads)
        self._onednn = OneDnnPacker()
        self._has_amx = "amx_bf16" in cpu_flags()

    @property
    def num_threads(self) -> int:
        """Threads that a call uses at most."""
        return self._num_threads if self._num_threads is not None else torch.get_num_threads()

    def allocate(
        self, shape: KVShape, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> CpuCache:
        """Zeroed KV memory of one layer, on huge pages where the system grants them.

        It comes fresh from the system, which zeroes a page when it is first written: a large cache takes no time here.

        Raises BackendUnavailable for what this backend cannot hold: another device than the CPU, see why_unsupported;
        MemoryError when the system does not even promise so much.
        """
        if device.type != "cpu":
            raise BackendUnavailable(f"the CPU kernels hold no memory on {device}")
        words_per_block = self._block_words(shape, block_size, dtype)
        num_bytes = num_blocks * words_per_block * 4
        try:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"the system has no {num_bytes} bytes for {num_blocks} blocks: {error}") from error
        words = torch.frombuffer(memory, dtype=torch.int32).view(num_blocks, words_per_block)
        self.library.advise_huge_pages(words.data_ptr(), words.nbytes)
        return CpuCache(shape=shape, block_size=block_size, dtype=dtype, words=words)

    def bytes_per_block(self, shape: KVShape, *, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block of one layer takes, padding included."""
        return self._block_words(shape, block_size, dtype) * 4

    def write_kv(self, cache: KVCache, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store rows at their slots."""
        own = _own(cache)
        if key.shape[0] == 0:
            return
        slots = slot_mapping.contiguous()
        call = self._write_call(own, key, value, slots)
        self.library.call("pagefleet_write_kv", ctypes.byref(call), DTYPE_CODES[own.dtype])

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
        """Causal attention, see src/row_block.h."""
        own = _own(cache)
        shape = own.shape
        num_rows, num_q_heads, _ = query.shape
        out = torch.empty(num_rows, num_q_heads, shape.v_head_dim, dtype=query.dtype)
        if num_rows == 0:
            return out
        row_stride, head_stride, _ = query.stride()
        starts, lens = batch.query_starts.contiguous(), batch.seq_lens.contiguous()
        tables = batch.block_tables if batch.block_tables.stride(-1) == 1 else batch.block_tables.contiguous()
        levels = None if sinks is None else sinks.to(torch.float32).contiguous()
        call = AttentionCall(
            query.data_ptr(),
            out.data_ptr(),
            own.words.data_ptr(),
            starts.data_ptr(),
            lens.data_ptr(),
            tables.data_ptr(),
            None if levels is None else levels.data_ptr(),
            row_stride,
            head_stride,
            tables.stride(0),
            num_rows,
            lens.shape[0],
            num_q_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.v_head_dim,
            own.num_blocks,
            own.block_size,
            tables.shape[1],
            0 if sliding_window is None else sliding_window,
            self.num_threads,
            scale,
            0.0 if softcap is None else softcap,
        )
        self.library.call("pagefleet_attention", ctypes.byref(call), DTYPE_CODES[own.dtype])
        return out

    def copy_blocks(self, cache: KVCache, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks."""
        own = _own(cache)
        flat = torch.tensor(pairs, dtype=torch.int64).reshape(-1)
        self.library.call(
            "pagefleet_copy_blocks",
            own.words.data_ptr(),
            flat.data_ptr(),
            len(pairs),
            own.num_blocks,
            own.words.shape[1] * 4,
        )

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

        positions int64 [T] are rows of cos_sin, float32 [positions, R], R even and <= D: cosines of R / 2 angles, then
        their sines, scaling factors included. Element i turns with i + R / 2, or (interleaved) each even one with the
        next; the rest pass through. query_norm and key_norm [D]: RMS norms per head before the rotation. All in
        float32, rounded once. Rows with slot -1 are turned, not stored.
        """
        own = _own(cache)
        check_rope(query, key, value, own, slot_mapping, positions, cos_sin, query_norm, key_norm)
        turned = torch.empty(query.shape, dtype=query.dtype)
        call = RopeCall(
            self._write_call(own, key, value, slot_mapping),
            query.data_ptr(),
            turned.data_ptr(),
            None if query_norm is None else query_norm.data_ptr(),
            None if key_norm is None else key_norm.data_ptr(),
            positions.data_ptr(),
            cos_sin.data_ptr(),
            query.stride(0),
            query.stride(1),
            query.shape[1],
            cos_sin.shape[1],
            cos_sin.shape[0],
            int(interleaved),
            epsilon,
            0.0,
        )
        self.library.call("pagefleet_rope_write_kv", ctypes.byref(call), DTYPE_CODES[own.dtype])
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
        """See CpuRowOps.add_rms_norm."""
        return self.row_ops.add_rms_norm(x, residual, weight, epsilon=epsilon, weight_offset=weight_offset)

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, 2 N] -> silu(x[:, :N]) * x[:, N:], [T, N]."""
        return self.row_ops.gated(x)

    def program(self, *, dtype: torch.dtype, max_rows: int, device: torch.device = _CPU) -> CpuProgram:
        """An empty program; see CpuProgram. Raises BackendUnavailable for another device than the CPU."""
        if device.type != "cpu":
            raise BackendUnavailable(f"the CPU kernels compute nothing on {device}")
        return CpuProgram(self.library, lambda: self.num_threads, dtype=dtype, max_rows=max_rows)

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, out_dtype: torch.dtype | None = None
    ) -> LinearFunction | None:
        """weight [N, K] and bias [N] or None -> the linear with its own packed copy; None where nothing here fits.

        The library's own kernel, except on CPUs with AMX, whose matrix units only oneDNN drives: there bf16 goes to it,
        unless the result is wanted wider, which it does not offer.
        """
        wide = out_dtype is not None and out_dtype != weight.dtype
        if wide or not (self._has_amx and weight.dtype == torch.bfloat16):
            own = PackedLinear.pack(self.library, weight, bias, lambda: self.num_threads, out_dtype=out_dtype)
            if own is not None or wide:
                return own
        return self._onednn.pack(weight, bias)

    def pack_grouped(
        self, weight: GroupedWeight, bias: torch.Tensor | None, *, dtype: torch.dtype, wide: bool = False
    ) -> GroupedLinear | None:
        """The linear with its own packed copy of a weight in its own scales; None for other dtypes."""
        return GroupedLinear.pack(self.library, weight, bias, lambda: self.num_threads, dtype=dtype, wide=wide)

    def _write_call(self, own: CpuCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> WriteCall:
        return WriteCall(
            key.data_ptr(),
            value.data_ptr(),
            own.words.data_ptr(),
            slots.data_ptr(),
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            key.shape[0],
            own.shape.num_kv_heads,
            own.shape.head_dim,
            own.shape.v_head_dim,
            own.num_blocks,
            own.block_size,
            self.num_threads,
        )

    @staticmethod
    def _block_words(shape: KVShape, block_size: int, dtype: torch.dtype) -> int:
        reason = why_unsupported(shape, block_size, dtype)
        if reason is not None:
            raise BackendUnavailable(reason)
        return block_words(shape, block_size, dtype)


def _own(cache: KVCache) -> CpuCache:
    if not isinstance(cache, CpuCache):
        raise KernelArgumentError(f"cache is a {type(cache).__name__}; it must be one that this backend allocated")
    return cache
