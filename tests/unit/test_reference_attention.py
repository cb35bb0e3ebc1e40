import math

import pytest
import torch

from pagefleet_kernels import ops
from pagefleet_kernels.dispatch import select_backend
from pagefleet_kernels.reference import ReferenceBackend, attention
from pagefleet_kernels.reference.cache import ReferenceCache
from support.attention_oracle import CASES, World, build, names

CPU = torch.device("cpu")
BACKEND = ReferenceBackend()


def filled_cache(world: World, dtype: torch.dtype, *, poison: bool = True) -> ReferenceCache:
    """Written history; every other slot holds NaN, the null block included."""
    cache = BACKEND.allocate(
        world.case.shape, num_blocks=world.num_blocks, block_size=world.case.block_size, dtype=dtype, device=CPU
    )
    if poison:
        cache.keys.fill_(math.nan)
        cache.values.fill_(math.nan)
    ops.write_kv(BACKEND, cache, world.history_keys, world.history_values, world.history_slots)
    return cache


def run(world: World, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ops.paged_attention(
        BACKEND,
        world.query,
        filled_cache(world, dtype),
        world.batch,
        scale=world.case.scale,
        sliding_window=world.case.sliding_window,
        softcap=world.case.softcap,
        sinks=world.sinks,
    )


@pytest.mark.parametrize("name", names())
def test_equals_float64_oracle(name: str) -> None:
    world = build(CASES[name])
    torch.testing.assert_close(run(world).double(), world.want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["decodes then chunks", "window, softcap and sinks", "V narrower than K"])
def test_half_precision_rounds_only_at_the_end(name: str, dtype: torch.dtype) -> None:
    world = build(CASES[name], dtype=dtype)
    torch.testing.assert_close(run(world, dtype).double(), world.want, rtol=2.0**-8, atol=1e-4)


def test_small_memory_bounds_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_GATHERED_ELEMENTS", 64)
    monkeypatch.setattr(attention, "MAX_SCORE_ELEMENTS", 64)
    for name in ("ragged decode, one long", "decodes then chunks", "window off the block grid"):
        world = build(CASES[name])
        torch.testing.assert_close(run(world).double(), world.want, rtol=1e-5, atol=1e-5)


def test_write_skips_padding_and_leaves_other_slots() -> None:
    world = build(CASES["decodes then chunks"])
    cache = BACKEND.allocate(world.case.shape, num_blocks=4, block_size=16, dtype=torch.float32, device=CPU)
    ones = torch.ones(3, 2, 16)
    ops.write_kv(BACKEND, cache, ones, 2 * ones, torch.tensor([17, -1, 40]))
    assert cache.keys.sum() == 2 * 2 * 16
    assert cache.values.view(2, -1, 16)[:, 17].eq(2).all()
    assert cache.values.view(2, -1, 16)[:, 40].eq(2).all()


def test_copy_blocks_copies_keys_and_values() -> None:
    world = build(CASES["decodes then chunks"])
    cache = filled_cache(world, torch.float32, poison=False)
    source = int(world.batch.block_tables[0, 0])
    used = set(world.batch.block_tables.flatten().tolist())
    target = next(block for block in range(1, world.num_blocks) if block not in used)
    ops.copy_blocks(BACKEND, cache, [(source, target)])
    assert torch.equal(cache.keys[:, source], cache.keys[:, target])
    assert torch.equal(cache.values[:, source], cache.values[:, target])


def test_bytes_per_block_is_what_allocate_takes() -> None:
    shape = CASES["V narrower than K"].shape
    cache = BACKEND.allocate(shape, num_blocks=7, block_size=32, dtype=torch.bfloat16, device=CPU)
    assert cache.num_bytes == 7 * ops.bytes_per_block(BACKEND, shape, block_size=32, dtype=torch.bfloat16)


def test_reference_is_chosen_by_name() -> None:
    assert select_backend(CPU, "reference").name == "reference"
