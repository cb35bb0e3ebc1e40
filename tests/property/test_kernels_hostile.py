"""Calls with any values in their tensors: an error that says what was wrong, or a result; never memory of others.

The CPU's own checks (`check_bounds=False`: the caller says that it has checked, and lies) are held to the same. The
sanitized libraries run this file, too, and see every byte that is touched.
"""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefleet_kernels import ops
from pagefleet_kernels.batch import AttentionBatch
from pagefleet_kernels.cpu.backend import CpuBackend
from pagefleet_kernels.errors import KernelArgumentError
from support.cpu_kernels import LEVELS, backend
from support.hostile import BLOCK_SIZE, EXTREMES, NUM_BLOCKS, NUMBERS, SHAPE, batches

CPU = torch.device("cpu")
NAMED = re.compile(r"(batch|slot_mapping|positions|pairs)[\w.\[\], ]*(is|must|names|at|\(or)")
"""Every refusal begins with the argument's name."""

levels = st.sampled_from(LEVELS)


def cache_of(owner: CpuBackend, dtype: torch.dtype) -> Any:
    cache = owner.allocate(SHAPE, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype, device=CPU)
    rows = torch.arange(BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE)
    key, value = torch.ones(len(rows), 2, 8, dtype=dtype), torch.ones(len(rows), 2, 6, dtype=dtype)
    owner.write_kv(cache, key, value, rows)
    return cache


@settings(max_examples=150, deadline=None, derandomize=True)
@given(batches(), st.booleans(), levels, st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([None, 3]))
def test_attention_over_any_batch(
    batch: AttentionBatch, checked: bool, level: str, dtype: torch.dtype, window: int | None
) -> None:
    owner = backend(level)
    cache = cache_of(owner, dtype)
    rows = len(batch.slot_mapping)
    query = torch.ones(rows, 4, 8, dtype=dtype)
    try:
        out = ops.paged_attention(owner, query, cache, batch, scale=1.0, sliding_window=window, check_bounds=checked)
    except KernelArgumentError as error:
        assert NAMED.match(str(error)), error
        return
    # All values in the cache are one (block 0, which the checks at the door refuse, is zeros): so is every result.
    assert out.shape == (rows, 4, 6)
    assert bool((out.float() >= 0).all())
    assert bool((out.float() <= 1.01).all())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(EXTREMES) | st.sampled_from([-(2**63), 2**63 - 1, 2**32, 2**32 + 20]), max_size=5),
    st.booleans(),
    levels,
)
def test_a_write_to_any_slots(slots: list[int], checked: bool, level: str) -> None:
    owner = backend(level)
    cache = cache_of(owner, torch.float32)
    before = cache.words.clone()
    key, value = torch.full((len(slots), 2, 8), 2.0), torch.full((len(slots), 2, 6), 2.0)
    try:
        ops.write_kv(owner, cache, key, value, torch.tensor(slots, dtype=torch.int64), check_bounds=checked)
    except KernelArgumentError as error:
        assert NAMED.match(str(error)), error
        assert torch.equal(cache.words, before)
        return
    changed = {int(block) for block in (cache.words != before).any(dim=1).nonzero()}
    assert changed == {slot // BLOCK_SIZE for slot in slots if slot >= 0}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([-(2**63), -1, 0, 3, 7, 8, 2**31, 2**63 - 1]), min_size=2, max_size=2), levels)
def test_a_rotation_at_any_positions(positions: list[int], level: str) -> None:
    owner = backend(level)
    cache = cache_of(owner, torch.float32)
    before = cache.words.clone()
    rows = torch.ones(2, 2, 8)
    try:
        owner.rope_write_kv(
            rows, rows, torch.ones(2, 2, 6), cache, slot_mapping=torch.tensor([16, 17]),
            positions=torch.tensor(positions), cos_sin=torch.ones(8, 8),
        )  # fmt: skip
    except KernelArgumentError as error:
        assert NAMED.match(str(error)), error
        assert torch.equal(cache.words, before)
        return
    assert all(0 <= position < 8 for position in positions)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(EXTREMES), st.sampled_from(EXTREMES)), max_size=3), levels)
def test_copies_of_any_blocks(pairs: list[tuple[int, int]], level: str) -> None:
    owner = backend(level)
    cache = cache_of(owner, torch.float32)
    before = cache.words.clone()
    try:
        ops.copy_blocks(owner, cache, pairs)
    except KernelArgumentError as error:
        assert NAMED.match(str(error)), error
        assert torch.equal(cache.words, before)
        return
    assert all(0 <= source < NUM_BLOCKS and 1 <= target < NUM_BLOCKS for source, target in pairs)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data(), levels, st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([1, 2, 33, 300]))
def test_a_draw_with_any_numbers_is_a_token(data: st.DataObject, level: str, dtype: torch.dtype, vocab: int) -> None:
    """Nonsense in, any token out: an id beyond the vocabulary would index other memory further on."""
    ends = data.draw(st.lists(NUMBERS, min_size=1, max_size=4))
    logits = torch.zeros(2, vocab)
    logits[:, : len(ends)] = torch.tensor(ends[:vocab] + [0.0] * max(0, len(ends) - vocab))[: min(vocab, len(ends))]
    if data.draw(st.booleans()):
        logits[1] = data.draw(NUMBERS)
    rule = {
        name: torch.tensor([data.draw(NUMBERS), data.draw(NUMBERS)], dtype=kind)
        for name, kind in (
            ("temperature", torch.float32), ("top_p", torch.float32), ("min_p", torch.float32),
            ("uniform", torch.float64),
        )
    }  # fmt: skip
    top_k = torch.tensor([data.draw(st.sampled_from(EXTREMES)) for _ in range(2)], dtype=torch.int32)
    tokens = backend(level).row_ops.sample(logits.to(dtype), top_k=top_k, **rule)
    assert bool(((tokens >= 0) & (tokens < vocab)).all()), tokens


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"sliding_window": 2**31}, "sliding_window is 2147483648"),
        ({"sliding_window": 1.5}, "sliding_window is 1.5"),
        ({"sliding_window": True}, "sliding_window is True"),
        ({"softcap": float("inf")}, "softcap is inf"),
        ({"softcap": float("nan")}, "softcap is nan"),
        ({"scale": float("inf")}, "scale is inf"),
        ({"scale": -1.0}, "scale is -1.0"),
    ],
)
def test_numbers_that_the_kernels_would_cut_are_refused(change: dict[str, Any], want: str) -> None:
    """A window of 2^31 became none in the library's int32; of 2^32 + 1 it became one token."""
    owner = backend()
    batch = AttentionBatch(
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([4], dtype=torch.int32),
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        slot_mapping=torch.tensor([-1]),
        num_decodes=1,
        max_query_len=1,
        max_seq_len=4,
    )
    with pytest.raises(KernelArgumentError, match=re.escape(want)):
        ops.paged_attention(
            owner, torch.ones(1, 4, 8), cache_of(owner, torch.float32), batch, **({"scale": 1.0} | change)
        )


@pytest.mark.parametrize("pair", [(1.5, 2), (1, 2.0), (True, 2)])
def test_blocks_to_copy_are_whole_numbers(pair: tuple[Any, Any]) -> None:
    owner = backend()
    with pytest.raises(KernelArgumentError, match=r"pairs\[0\] "):
        ops.copy_blocks(owner, cache_of(owner, torch.float32), [pair])
