"""KV writes, the fused rotation and block copies in Triton, interpreted on CPU, against plain arithmetic."""

from typing import Any

import pytest
import torch

from pagefleet_kernels.batch import KVShape
from support import triton_work as work
from support.triton_interpreter import Interpreter, interpreter

__all__ = ["interpreter"]

FP8 = torch.float8_e4m3fn
SLOTS = [16, 33, -1, 63, 17]
"""Not sorted, one without a home, first and last of a block."""


def want_stored(rows: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """What memory of a dtype holds of rows [T, H, W], as float32, before the scales are applied again."""
    if scales is None:
        return rows.to(dtype).float()
    return (rows.float() / scales[:, None]).clamp(-448.0, 448.0).to(dtype).float()


def assert_written(stored: torch.Tensor, rows: torch.Tensor, slots: list[int], tolerance: float) -> None:
    """stored [blocks, block_size, H, W] holds rows at their slots and its poison (NaN) everywhere else."""
    flat = stored.flatten(0, 1)
    untouched = torch.ones(flat.shape[0], dtype=torch.bool)
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            torch.testing.assert_close(flat[slot], row, rtol=tolerance, atol=tolerance * 0.1)
            untouched[slot] = False
    assert bool(flat[untouched].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, FP8])
@pytest.mark.parametrize("shape", [KVShape(3, 64, 64), KVShape(2, 24, 16), KVShape(9, 80, 128)], ids=str)
def test_writes_rows_where_they_belong_and_nothing_else(
    interpreter: Interpreter, dtype: torch.dtype, shape: KVShape
) -> None:
    """Rows have strides of their own; fp8 rows are clamped to what fp8 can hold, never NaN."""
    got = interpreter.run(work.cache_bytes, dtype, SLOTS, shape, 16, 1)
    assert_written(got["keys"], want_stored(got["key"], got["key_scales"], dtype), SLOTS, 0.0)
    assert_written(got["values"], want_stored(got["value"], got["value_scales"], dtype), SLOTS, 0.0)


ROPES = {
    "all of the head": work.RopeCase(KVShape(2, 64, 64), query_heads=6, rotary=64),
    "half of the head": work.RopeCase(KVShape(1, 64, 64), query_heads=3, rotary=32),
    "interleaved pairs": work.RopeCase(KVShape(2, 32, 32), query_heads=4, rotary=32, interleaved=True),
    "interleaved, part of the head": work.RopeCase(KVShape(2, 48, 32), query_heads=4, rotary=24, interleaved=True),
    "with norms": work.RopeCase(KVShape(2, 80, 80), query_heads=4, rotary=80, norms=True),
    "with norms, part of the head": work.RopeCase(KVShape(2, 96, 64), query_heads=4, rotary=32, norms=True),
    "more heads than one program takes": work.RopeCase(KVShape(18, 128, 128), query_heads=36, rotary=128),
    "bf16": work.RopeCase(KVShape(2, 64, 64), query_heads=6, rotary=64, dtype=torch.bfloat16, norms=True),
    "fp8 memory": work.RopeCase(KVShape(2, 64, 64), 6, rotary=64, dtype=torch.bfloat16, storage=FP8),
}


def rotated(rows: torch.Tensor, case: work.RopeCase, got: dict[str, Any], norm: torch.Tensor | None) -> torch.Tensor:
    """float64 oracle: rows [T, H, D] -> turned."""
    rows = rows.double()
    if norm is not None:
        rows = rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    cos, sin = got["cos_sin"][got["positions"]].double()[:, None].chunk(2, dim=-1)
    turning, rest = rows[..., : case.rotary], rows[..., case.rotary :]
    if case.interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    else:
        first, second = turning.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned, rest], dim=-1)


@pytest.mark.parametrize("name", sorted(ROPES))
def test_turns_and_stores_in_one_pass(interpreter: Interpreter, name: str) -> None:
    case = ROPES[name]
    got = interpreter.run(work.rope, case)
    storage = case.storage or case.dtype
    coarse = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[case.dtype]
    turned = rotated(got["query"], case, got, got["norms"][0])
    torch.testing.assert_close(got["turned"].double(), turned, rtol=coarse, atol=coarse)
    key = rotated(got["key"], case, got, got["norms"][1])
    slots = got["slots"].tolist()
    step = 0.13 if storage == FP8 else coarse  # one step of 3 mantissa bits
    assert_written(got["keys"], want_stored(key, got["key_scales"], storage), slots, step)
    assert_written(got["values"], want_stored(got["value"], got["value_scales"], storage), slots, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize("shape", [KVShape(3, 64, 64), KVShape(1, 17, 5)], ids=str)
def test_copies_whole_blocks(interpreter: Interpreter, dtype: torch.dtype, shape: KVShape) -> None:
    """One source may have several destinations."""
    pairs = [(1, 4), (1, 5), (7, 2), (0, 8)]
    before, after = interpreter.run(work.copied, dtype, pairs, shape, 16)
    want = before.clone()
    for source, destination in pairs:
        want[destination] = before[source]
    assert torch.equal(after, want)
