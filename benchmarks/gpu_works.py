"""What kernels_gpu.py measures: attention calls of many shapes, and how large everything is."""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_checks import CASES, CheckCase
from benchmarks.gpu_neighbours import NeighbourSizes
from benchmarks.gpu_timing import DEVICE
from pagefleet_kernels.batch import AttentionBatch, KVShape

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
FILL_BLOCKS = 16384
"""Filled at a time, to bound the random numbers held."""


@dataclass(frozen=True, slots=True)
class Work:
    """One attention call: sequences of equal length, rows each."""

    name: str
    sequences: int
    rows: int
    length: int
    head_dim: int = 128
    storage: torch.dtype = BF16
    floor_ratio: float | None = None
    """Target: share of measured copy bandwidth (decode), or None."""
    target_tflops: float | None = None
    heads: int = 32
    kv_heads: int = 8

    @property
    def kv_bytes(self) -> int:
        """What a call must read at least."""
        return self.sequences * self.length * self.kv_heads * 2 * self.head_dim * self.storage.itemsize

    @property
    def flops(self) -> float:
        """Multiplications and additions under the causal mask."""
        pairs = self.rows * (self.length - self.rows) + self.rows * (self.rows + 1) / 2
        return 4.0 * self.sequences * self.heads * self.head_dim * pairs


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a run is."""

    decodes: tuple[Work, ...]
    prefills: tuple[Work, ...]
    fp8_gains: tuple[str, ...]
    """Decodes that are measured in bf16 and, with " fp8" behind the name, in fp8."""
    checks: tuple[CheckCase, ...]
    check_lengths: tuple[int, ...]
    """Decode lengths whose bits are compared alone and in a batch."""
    neighbours: NeighbourSizes
    copy_bytes: int
    matmul_width: int
    most_buffers: int
    """Sets of buffers that one timing walks through at most."""


FULL = Scale(
    decodes=(
        Work("decode 1 x 1k", 1, 1, 1024),
        Work("decode 1 x 8k", 1, 1, 8192),
        Work("decode 1 x 128k", 1, 1, 131072, floor_ratio=0.85),
        Work("decode 8 x 4k", 8, 1, 4096, floor_ratio=0.60),
        Work("decode 32 x 4k", 32, 1, 4096, floor_ratio=0.85),
        Work("decode 128 x 4k", 128, 1, 4096, floor_ratio=0.85),
        Work("decode 256 x 1k", 256, 1, 1024, floor_ratio=0.85),
        Work("decode 64 x 4k D64", 64, 1, 4096, head_dim=64, floor_ratio=0.85),
        Work("decode 32 x 4k fp8", 32, 1, 4096, storage=FP8),
        Work("decode 128 x 4k fp8", 128, 1, 4096, storage=FP8),
    ),
    prefills=(
        Work("prefill 1 x 4k", 1, 4096, 4096, target_tflops=350),
        Work("prefill 1 x 16k", 1, 16384, 16384, target_tflops=350),
        Work("prefill 4 x 4k", 4, 4096, 4096, target_tflops=350),
        Work("prefill 512 after 8k", 4, 512, 8704),
        Work("prefill 1 x 8k D64", 1, 8192, 8192, head_dim=64, target_tflops=280),
        Work("prefill 1 x 8k fp8 KV", 1, 8192, 8192, storage=FP8),
    ),
    fp8_gains=("decode 32 x 4k", "decode 128 x 4k"),
    checks=CASES,
    check_lengths=(5, 300, 2000, 700),
    neighbours=NeighbourSizes(),
    copy_bytes=1 << 32,
    matmul_width=8192,
    most_buffers=16,
)


@dataclass(frozen=True, slots=True)
class Scene:
    """Tensors of one call."""

    query: torch.Tensor
    cache: Any
    batch: AttentionBatch


def make_scene(backend: Any, work: Work, *, seed: int, block_size: int = 16) -> Scene:
    """Random data; blocks of every sequence scattered over the pool."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = KVShape(num_kv_heads=work.kv_heads, head_dim=work.head_dim, v_head_dim=work.head_dim)
    blocks = -(-work.length // block_size)
    total = work.sequences * blocks + 1
    cache = backend.allocate(shape, num_blocks=total, block_size=block_size, dtype=work.storage, device=DEVICE)
    for memory in (cache.keys, cache.values):
        for part in memory.split(FILL_BLOCKS):
            part.copy_(torch.randn(part.shape, generator=generator, device=DEVICE, dtype=BF16).to(work.storage))
    rows = work.sequences * work.rows
    order = torch.randperm(total - 1, generator=generator, device=DEVICE) + 1
    batch = AttentionBatch(
        query_starts=torch.arange(0, rows + 1, work.rows, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.full((work.sequences,), work.length, dtype=torch.int32, device=DEVICE),
        block_tables=order.view(work.sequences, blocks).to(torch.int32),
        slot_mapping=torch.full((rows,), -1, dtype=torch.int64, device=DEVICE),
        num_decodes=work.sequences if work.rows == 1 else 0,
        max_query_len=work.rows,
        max_seq_len=work.length,
    )
    query = torch.randn(rows, work.heads, work.head_dim, generator=generator, device=DEVICE, dtype=BF16)
    return Scene(query=query, cache=cache, batch=batch)


def call(backend: Any, work: Work, scene: Scene) -> torch.Tensor:
    """One attention call."""
    out: torch.Tensor = backend.paged_attention(scene.query, scene.cache, scene.batch, scale=work.head_dim**-0.5)
    return out
