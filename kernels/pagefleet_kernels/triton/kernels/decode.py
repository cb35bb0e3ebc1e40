"""Split-KV decode: one query row per sequence, its KV cut at absolute positions, partial results combined in order.

out = sum_i w_i acc_i / sum_i w_i,  w_i = 2^(lse_i - max lse): splits are softmaxes over disjoint keys (Flash-Decoding).

    0        split_len     2 split_len                seq_len          key positions
    |-- split 0 --|-- split 1 --|-- ... --|-- last --|
                       ^ first key inside the sliding window: splits before it do not exist

split_len = SPLIT * ceil(seq_len / (SPLIT * MAX_SPLITS)): a function of the row's own length, so a row's bits depend
neither on the batch nor on how many SMs there are, and there are never more than MAX_SPLITS partial results.
"""

import triton
import triton.language as tl

from pagefleet_kernels.triton.kernels.scores import (
    fit_query,
    load_rows,
    slot_offsets,
    soft_cap,
    softmax_step,
    widen,
)


@triton.jit
def split_range(seq_len, window, HAS_WINDOW: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """(first visible key, tokens per split, first split, number of splits) of a row whose sequence is not empty."""
    split_len = SPLIT * tl.cdiv(seq_len, SPLIT * MAX_SPLITS)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(seq_len - window, 0)
    first_split = first_key // split_len
    return first_key, split_len, first_split, (seq_len - 1) // split_len - first_split + 1


@triton.jit(do_not_specialize=["window", "slots", "stride_table"])
def paged_decode(
    out,  # [S, Hq, DV]
    query,  # [S, Hq, D]
    keys,  # [blocks, PAGE, Hkv, D] by strides
    values,  # [blocks, PAGE, Hkv, DV] by strides
    block_tables,  # int32 [S, max_blocks]
    seq_lens,  # int32 [S]
    sinks,  # [Hq] or None
    key_scales,  # fp32 [Hkv] or None: what a stored fp8 key is multiplied by
    value_scales,  # fp32 [Hkv] or None
    partial_out,  # fp32 [S, Hq, SLOTS, DV]
    partial_lse,  # fp32 [S, Hq, SLOTS], base 2
    scale_log2,
    cap_log2,
    window,
    slots,
    stride_out_row,
    stride_out_head,
    stride_query_row,
    stride_query_head,
    stride_key_block,
    stride_key_token,
    stride_key_head,
    stride_value_block,
    stride_value_token,
    stride_value_head,
    stride_table,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    KV_FP8: tl.constexpr,
    SAME_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (S, Hkv * head blocks, slots). Slot i computes the i-th split that exists; the rest leave at once."""
    seq = tl.program_id(0).to(tl.int64)
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    slot = tl.program_id(2)
    seq_len = tl.load(seq_lens + seq)

    in_group = (tl.program_id(1) % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = in_group < GROUP
    head = kv_head * GROUP + in_group
    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    out_ptrs = out + seq * stride_out_row + head[:, None] * stride_out_head + dv[None, :]
    out_ok = head_ok[:, None] & (dv < DV)[None, :]
    if seq_len <= 0:
        if slot == 0:
            tl.store(out_ptrs, tl.zeros([BLOCK_H, DV_PAD], tl.float32).to(out.dtype.element_ty), mask=out_ok)
        return
    first_key, split_len, first_split, num_splits = split_range(seq_len, window, HAS_WINDOW, SPLIT, MAX_SPLITS)
    if num_splits > slots:  # longer than the max_seq_len that the call was planned for: loud, and no write outside
        if slot == 0:
            lost = tl.full([BLOCK_H, DV_PAD], float("nan"), tl.float32)
            tl.store(out_ptrs, lost.to(out.dtype.element_ty), mask=out_ok)
        return
    if slot >= num_splits:
        return
    start = (first_split + slot) * split_len
    stop = tl.minimum(start + split_len, seq_len)
    start = tl.maximum(start, first_key // TILE * TILE)  # tiles stay at absolute positions

    q_ptrs = query + seq * stride_query_row + head[:, None] * stride_query_head + d[None, :]
    q = tl.load(q_ptrs, mask=head_ok[:, None] & (d < D)[None, :], other=0.0)  # [BLOCK_H, D_PAD]
    q, q_factor = fit_query(q, KV_FP8)
    score_scale = q_factor * scale_log2
    if key_scales is not None:
        score_scale = score_scale * tl.load(key_scales + kv_head)

    acc = tl.zeros([BLOCK_H, DV_PAD], tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    if sinks is not None:
        if slot == 0:
            peak = tl.load(sinks + head, mask=head_ok, other=0.0).to(tl.float32) * 1.4426950408889634
            total = tl.full([BLOCK_H], 1.0, tl.float32)

    table = block_tables + seq * stride_table
    key_base = keys + kv_head * stride_key_head
    value_base = values + kv_head * stride_value_head
    for tile in range(start, stop, TILE):
        position = tile + tl.arange(0, TILE)
        in_range = position < stop
        key_rows = slot_offsets(table, position, in_range, stride_key_block, stride_key_token, PAGE, True)
        k = widen(load_rows(key_base, key_rows, d, in_range, D, D_PAD, True), KV_FP8)  # [TILE, D_PAD]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * score_scale[:, None]
        if HAS_CAP:
            scores = soft_cap(scores, cap_log2)
        visible = in_range
        if HAS_WINDOW:
            visible = visible & (position >= first_key)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        value_rows = key_rows
        if not SAME_ROWS:
            value_rows = slot_offsets(table, position, in_range, stride_value_block, stride_value_token, PAGE, True)
        v = widen(load_rows(value_base, value_rows, dv, in_range, DV, DV_PAD, True), KV_FP8)  # [TILE, DV_PAD]
        # Every tile holds a visible key, so no row's peak can still be -inf.
        acc, total, peak = softmax_step(scores, v, acc, total, peak, PRECISION, False)

    result = acc / total[:, None]
    if value_scales is not None:
        result = result * tl.load(value_scales + kv_head)
    if num_splits == 1:
        tl.store(out_ptrs, result.to(out.dtype.element_ty), mask=out_ok)
    else:
        row = (seq * (tl.num_programs(1) // HEAD_BLOCKS) * GROUP + head) * slots + slot
        tl.store(partial_out + row[:, None] * DV + dv[None, :], result, mask=out_ok)
        tl.store(partial_lse + row, peak + tl.log2(total), mask=head_ok)


@triton.jit(do_not_specialize=["window", "slots", "stride_table"])
def combine_splits(
    out,  # [S, Hq, DV]
    partial_out,  # fp32 [S, Hq, SLOTS, DV]
    partial_lse,  # fp32 [S, Hq, SLOTS]
    seq_lens,
    window,
    slots,
    stride_out_row,
    stride_out_head,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Grid (S, Hq). Walks the row's own splits in chunks of a fixed size; rows with one split are already written."""
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens + seq)
    if seq_len <= 0:
        return
    _, _, _, num_splits = split_range(seq_len, window, HAS_WINDOW, SPLIT, MAX_SPLITS)
    if (num_splits == 1) | (num_splits > slots):
        return
    dv = tl.arange(0, DV_PAD)
    row = (seq * tl.num_programs(1) + head) * slots
    lanes = tl.arange(0, CHUNK)
    peak = float("-inf")
    for first in range(0, num_splits, CHUNK):
        lse = tl.load(partial_lse + row + first + lanes, mask=first + lanes < num_splits, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(lse, axis=0))
    total = 0.0
    acc = tl.zeros([DV_PAD], tl.float32)
    for first in range(0, num_splits, CHUNK):
        ok = first + lanes < num_splits
        lse = tl.load(partial_lse + row + first + lanes, mask=ok, other=float("-inf"))
        weights = tl.exp2(lse - peak)
        part = tl.load(
            partial_out + (row + first + lanes)[:, None] * DV + dv[None, :],
            mask=ok[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        total += tl.sum(weights, axis=0)
        acc += tl.sum(part * weights[:, None], axis=0)
    tl.store(
        out + seq * stride_out_row + head * stride_out_head + dv,
        (acc / total).to(out.dtype.element_ty),
        mask=dv < DV,
    )
