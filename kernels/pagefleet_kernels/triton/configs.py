"""Tile sizes, warps and stages: a table, not an autotuner (a tuner's choice would depend on the first batch it met).

Every entry is compiled for sm_80, sm_90 and sm_100 by tests/unit/test_kernels_triton_compile.py, which holds them to no
spills and to the shared memory of the device. Nothing here depends on the batch: the same row gets the same arithmetic.
"""

from dataclasses import dataclass

from pagefleet_kernels.triton.launch import Device

LARGE_SHARED_BYTES = 200 * 1024
"""What sm_90 and sm_100 have, and sm_80 (163 KiB), sm_86, sm_89 and sm_120 (99 KiB) have not."""
DECODE_SPLIT = 256
"""Keys of one split of a decode row's KV."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How paged_decode walks its keys."""

    tile: int
    """Keys per step."""
    split: int
    """Keys per split of a sequence of up to split * max_splits tokens; a multiple of tile."""
    max_splits: int
    """Longer sequences get longer splits, so that partial results never exceed this many."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How paged_prefill tiles its work."""

    rows: int
    """Tokens x query heads of one program. 64 per warp group of 4 warps makes Hopper use wgmma."""
    tile: int
    """Keys per step."""
    num_warps: int
    num_stages: int


def pow2(value: int, at_least: int = 16) -> int:
    """The next power of two; tensor cores want 16 columns at least."""
    return max(at_least, 1 << (value - 1).bit_length())


def decode_config(device: Device, head_dim: int, v_head_dim: int, kv_bytes: int) -> DecodeConfig:
    """kv_bytes: bytes of one stored element. Small tiles, many programs: enough bytes in flight, few registers."""
    tile, num_warps, num_stages = 64, 4, 3
    widest = max(pow2(head_dim), pow2(v_head_dim))
    if kv_bytes > 2 and device.capability:  # no tensor cores: products live in registers
        tile, num_warps, num_stages = 16, 8, 1
    elif widest > 256:
        tile, num_warps, num_stages = 16, 8, 3
    elif widest == 256 and kv_bytes == 1:  # widened keys and values lie in registers
        tile = 16
    elif widest == 256 and device.shared_bytes < LARGE_SHARED_BYTES:
        tile, num_stages = 32, 2
    return DecodeConfig(tile=tile, split=DECODE_SPLIT, max_splits=64, num_warps=num_warps, num_stages=num_stages)


def prefill_config(device: Device, head_dim: int, v_head_dim: int, kv_bytes: int) -> PrefillConfig:
    """kv_bytes: bytes of one stored element; 4 is float32, for tests and for models that insist."""
    narrowest, widest = sorted((pow2(head_dim), pow2(v_head_dim)))
    large = device.shared_bytes >= LARGE_SHARED_BYTES
    rows, tile, num_warps, num_stages = 128, 64, 8, 3 if large else 2
    if device.capability == 0:
        rows = 64
    elif kv_bytes > 2:
        rows, tile, num_stages = 32, 16, 1
    elif widest > 256:
        rows, tile, num_stages = 32, 32 if large else 16, 2
    elif widest == 256 and large and (narrowest <= 128 or (kv_bytes == 1 and device.capability < 100)):
        # Widened fp8 takes registers that wgmma holds: half the rows, on both of its warp groups.
        rows, tile, num_stages = 128 if narrowest <= 128 else 64, 64, 2
    elif widest == 256 and large:
        rows, tile, num_stages = 128, 32, 2
    elif widest == 256:
        rows, tile = 64, 32
        num_warps, num_stages = (8, 2) if narrowest == 256 else (4, 1)
    elif widest == 128 and not large:  # two programs per multiprocessor instead of one that spills
        rows, tile, num_warps = 64, 32, 4
    elif widest <= 64 and large and device.capability >= 100:
        rows, tile, num_warps, num_stages = 64, 64, 4, 3
    return PrefillConfig(rows=rows, tile=tile, num_warps=num_warps, num_stages=num_stages)
