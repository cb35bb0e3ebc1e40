"""The same attention by others: contiguous KV through torch, paged KV through the other backends."""

from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_timing import DEVICE, Timing, rotations, time_graph
from benchmarks.gpu_works import BF16, FP8, Work, call, make_scene
from pagefleet_kernels.dispatch import select_backend
from pagefleet_kernels.errors import BackendUnavailable, KernelArgumentError

CONTIGUOUS = {"FA2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
PAGED = {"torch varlen": ("varlen", 256), "FlashInfer": ("flashinfer", 16)}
"""Shown name -> (backend, block size)."""


def contiguous(work: Work, name: str, most_buffers: int) -> Timing | str:
    """scaled_dot_product_attention over contiguous KV; the reason where that backend refuses."""
    if work.rows != 1 and work.rows != work.length:
        return "no causal chunk there"
    shape = (work.sequences, work.kv_heads, work.length, work.head_dim)
    count = rotations(work.kv_bytes if work.storage == BF16 else 2 * work.kv_bytes, most_buffers)
    keys = [torch.randn(shape, device=DEVICE, dtype=BF16) for _ in range(count)]
    values = [torch.randn(shape, device=DEVICE, dtype=BF16) for _ in range(count)]
    query = torch.randn(work.sequences, work.heads, work.rows, work.head_dim, device=DEVICE, dtype=BF16)

    def attend(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, k, v, is_causal=work.rows > 1, enable_gqa=True)

    try:
        with sdpa_kernel(CONTIGUOUS[name]):
            return time_graph([partial(attend, k, v) for k, v in zip(keys, values, strict=True)])
    except RuntimeError as error:
        return _reason(error)


def paged(work: Work, name: str, most_buffers: int) -> Timing | str:
    """Another backend over the same pages; the reason where it, or this install, has none."""
    if work.storage == FP8:
        return "no fp8 there"
    chosen, block_size = PAGED[name]
    try:
        calls = []
        for seed in range(rotations(work.kv_bytes, most_buffers)):
            # One each: FlashInfer's holds its last batch's plan, made on the host by a call that no graph can hold.
            backend = select_backend(DEVICE, chosen)
            calls.append(partial(call, backend, work, make_scene(backend, work, seed=seed, block_size=block_size)))
        return time_graph(calls)
    except (BackendUnavailable, KernelArgumentError, RuntimeError) as error:
        return _reason(error)


def _reason(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:60]
