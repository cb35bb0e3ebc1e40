"""The C++ paged attention against the float64 oracle, at every instruction set, from caches full of NaN."""

import pytest
import torch

from pagefleet_kernels import ops
from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.errors import BackendUnavailable, KernelArgumentError
from support.attention_oracle import CASES, Case, World, build, names
from support.cpu_kernels import CPU, LEVELS, NAN_WORDS, attend, backend, poisoned_cache

BLOCKS_OF_8 = {name for name, case in CASES.items() if case.block_size == 8}

# What the shared cases do not reach: several spans (64) and splits (512) of keys, many rows, odd widths, big groups.
LONG_CASES: dict[str, Case] = {
    "decode over several splits": Case(((1, 511), (1, 512), (1, 513), (1, 1100)), scale=0.3),
    "chunk across a split boundary": Case(((30, 520), (3, 1030)), scale=0.3),
    "rows beyond one row block": Case(((120, 130), (1, 1)), KVShape(1, 32, 32), num_q_heads=3),
    "more query heads than a row block holds": Case(((2, 20),), KVShape(1, 16, 16), num_q_heads=100),
    "window across split boundaries": Case(((1, 1040), (40, 560)), sliding_window=100),
    "window, softcap, sinks over splits": Case(((1, 700), (9, 600)), sliding_window=530, softcap=3.0, with_sinks=True),
    "widths off the register": Case(((1, 70), (9, 75)), KVShape(2, 18, 37), num_q_heads=4),
    "MLA-like widths": Case(((1, 40), (3, 20)), KVShape(1, 576, 512), num_q_heads=8, scale=0.05),
    "head 80": Case(((1, 70), (9, 75)), KVShape(2, 80, 80), num_q_heads=4, scale=0.11),
    "head 256, blocks of 32": Case(((1, 70), (9, 75)), KVShape(1, 256, 256), num_q_heads=2, block_size=32, scale=0.06),
    "head 2": Case(((1, 70), (9, 75)), KVShape(1, 2, 1), num_q_heads=5),
}
ALL_CASES = {**CASES, **LONG_CASES}


def assert_close(got: torch.Tensor, world: World) -> None:
    """fp32: rounding of a few hundred terms. bf16: half an ulp of the result and of the weights."""
    unit = 2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-19
    torch.testing.assert_close(got.double(), world.want, atol=1.5 * unit, rtol=1.5 * unit)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name in names([*ALL_CASES]) if name not in BLOCKS_OF_8])
def test_attention_matches_the_float64_oracle(name: str, dtype: torch.dtype, level: str) -> None:
    world = build(ALL_CASES[name], dtype=dtype)
    assert_close(attend(backend(level), world), world)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_large_scores_neither_overflow_nor_vanish(dtype: torch.dtype, level: str) -> None:
    """Scores in the thousands: the weight of the largest key is 1 and of others exactly 0."""
    world = build(Case(((1, 90), (10, 70)), scale=300.0), dtype=dtype)
    got = attend(backend(level), world)
    assert torch.isfinite(got).all()
    # In fp32 a score of ~3000 is known to 2^-12 only, and its exponential no better.
    torch.testing.assert_close(got.double(), world.want, atol=0.02, rtol=0.02)


def test_nan_of_a_visible_key_reaches_the_rows_that_see_it_and_no_other() -> None:
    world = build(Case(((20, 20),)))
    owner = backend()
    cache = poisoned_cache(owner, world)
    slot = int(world.batch.block_tables[0, 0]) * 16 + 11
    nan = torch.full((1, 2, 16), float("nan"))
    owner.write_kv(cache, nan, nan, torch.tensor([slot]))
    got = owner.paged_attention(world.query, cache, world.batch, scale=0.25)
    assert_rows = torch.isnan(got).all(dim=2).all(dim=1)
    assert assert_rows.tolist() == [row >= 11 for row in range(20)]
    clean = attend(owner, world)
    assert torch.equal(got[:11], clean[:11])


def test_a_strided_query_of_a_fused_projection_is_read_in_place() -> None:
    world = build(CASES["decodes then chunks"], dtype=torch.bfloat16)
    rows, heads, dim = world.query.shape
    fused = torch.full((rows, heads + 5, dim + 3), float("nan"), dtype=torch.bfloat16)
    view = fused[:, 2 : 2 + heads, 1 : 1 + dim]
    view.copy_(world.query)
    owner = backend()
    cache = poisoned_cache(owner, world)
    got = owner.paged_attention(view, cache, world.batch, scale=0.25)
    assert torch.equal(got, attend(owner, world))


def test_a_step_without_rows_gives_an_empty_result() -> None:
    world = build(CASES["nothing at all"])
    assert attend(backend(), world).shape == (0, 6, 16)


def test_block_ids_and_slots_outside_are_refused_by_the_library_itself() -> None:
    owner = backend()
    world = build(CASES["ragged decode, one long"])
    cache = poisoned_cache(owner, world)
    for bad in (-1, world.num_blocks):
        tables = world.batch.block_tables.clone()
        tables[1, 12] = bad
        with pytest.raises(KernelArgumentError, match=r"block_tables.* at index 1"):
            owner.paged_attention(world.query, cache, _batch_with(world, block_tables=tables), scale=1.0)
    lens = world.batch.seq_lens.clone()
    lens[2] = 10_000
    with pytest.raises(KernelArgumentError, match=r"seq_lens\[2\]"):
        owner.paged_attention(world.query, cache, _batch_with(world, seq_lens=lens), scale=1.0)
    starts = world.batch.query_starts.clone()
    starts[1] = 3
    with pytest.raises(KernelArgumentError, match=r"query_starts.*sequence 1"):
        owner.paged_attention(world.query, cache, _batch_with(world, query_starts=starts), scale=1.0)
    for bad in (-2, world.num_blocks * 16):
        with pytest.raises(KernelArgumentError, match=r"slot_mapping\[1\]"):
            owner.write_kv(cache, world.history_keys[:2], world.history_values[:2], torch.tensor([20, bad]))
    for pair in ((0, world.num_blocks), (-1, 1)):
        with pytest.raises(KernelArgumentError, match="index 1"):
            owner.copy_blocks(cache, [(1, 2), pair])


def test_table_entries_out_of_a_window_are_not_read() -> None:
    """Blocks that slid out of every row's window are freed: their entries may hold anything."""
    world = build(Case(((1, 200), (4, 150)), sliding_window=40))
    tables = world.batch.block_tables.clone()
    tables[0, : (200 - 40) // 16] = -5
    tables[1, : (147 - 40) // 16] = 2**30
    owner = backend()
    got = owner.paged_attention(
        world.query,
        poisoned_cache(owner, world),
        _batch_with(world, block_tables=tables),
        scale=0.25,
        sliding_window=40,
    )
    assert torch.equal(got, attend(owner, world))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_write_touches_its_slots_only_and_skips_minus_one(dtype: torch.dtype) -> None:
    owner = backend()
    cache = owner.allocate(KVShape(3, 16, 20), num_blocks=4, block_size=32, dtype=dtype, device=CPU)
    cache.words.fill_(NAN_WORDS[dtype])
    before = cache.words.clone()
    key, value = torch.randn(3, 3, 16).to(dtype), torch.randn(3, 3, 20).to(dtype)
    owner.write_kv(cache, key, value, torch.tensor([-1, -1, -1]))
    assert torch.equal(cache.words, before)
    owner.write_kv(cache, key, value, torch.tensor([33, -1, 127]))
    written = sum(int((~torch.isnan(cache.words[block].view(dtype))).sum()) for block in range(4))
    assert written == 2 * 3 * (16 + 20)
    assert torch.equal(cache.words[[0, 2]], before[[0, 2]])


def test_copied_blocks_attend_as_their_sources() -> None:
    world = build(Case(((1, 40),)), spare_blocks=8)
    owner = backend()
    cache = poisoned_cache(owner, world)
    used = set(world.batch.block_tables[0, :3].tolist())
    spare = [block for block in range(1, world.num_blocks) if block not in used][:3]
    ops.copy_blocks(owner, cache, list(zip(world.batch.block_tables[0, :3].tolist(), spare, strict=True)))
    tables = world.batch.block_tables.clone()
    tables[0, :3] = torch.tensor(spare, dtype=torch.int32)
    got = owner.paged_attention(world.query, cache, _batch_with(world, block_tables=tables), scale=0.25)
    assert torch.equal(got, attend(owner, world))


@pytest.mark.parametrize(
    ("shape", "block_size", "dtype", "reason"),
    [
        (KVShape(1, 16, 16), 8, torch.float32, "block size"),
        (KVShape(1, 16, 16), 16, torch.float16, "float16"),
        (KVShape(1, 16, 16), 16, torch.float64, "float64"),
        (KVShape(1, 15, 16), 16, torch.bfloat16, "even head_dim"),
    ],
)
def test_what_the_kernels_cannot_hold_is_unavailable_with_the_reason(
    shape: KVShape, block_size: int, dtype: torch.dtype, reason: str
) -> None:
    owner = backend()
    with pytest.raises(BackendUnavailable, match=reason):
        owner.allocate(shape, num_blocks=2, block_size=block_size, dtype=dtype, device=CPU)
    with pytest.raises(BackendUnavailable, match=reason):
        owner.bytes_per_block(shape, block_size=block_size, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_cache_holds_exactly_what_it_says_and_starts_at_zero(dtype: torch.dtype) -> None:
    owner = backend()
    shape = KVShape(2, 64, 40)
    cache = owner.allocate(shape, num_blocks=5, block_size=32, dtype=dtype, device=CPU)
    assert cache.num_bytes == 5 * owner.bytes_per_block(shape, block_size=32, dtype=dtype)
    assert owner.bytes_per_block(shape, block_size=32, dtype=dtype) == 2 * 32 * (64 + 48) * dtype.itemsize
    assert not cache.words.any()


def test_a_cache_of_another_backend_is_refused() -> None:
    class Foreign:
        shape, num_blocks, block_size, num_bytes = KVShape(1, 16, 16), 2, 16, 0
        dtype, device = torch.float32, CPU

    with pytest.raises(KernelArgumentError, match="Foreign"):
        backend().copy_blocks(Foreign(), [(0, 1)])


def _batch_with(
    world: World,
    *,
    query_starts: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
) -> AttentionBatch:
    batch = world.batch
    return AttentionBatch(
        query_starts=batch.query_starts if query_starts is None else query_starts,
        seq_lens=batch.seq_lens if seq_lens is None else seq_lens,
        block_tables=batch.block_tables if block_tables is None else block_tables,
        slot_mapping=batch.slot_mapping,
        num_decodes=batch.num_decodes,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
    )
