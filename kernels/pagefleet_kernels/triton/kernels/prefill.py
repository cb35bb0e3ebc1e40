"""Extend: many query rows per sequence over its paged KV (prompts, chunks of prompts, the rest after a cache hit).

One program owns ROWS = tokens x query heads of one kv head, so a K or V tile is read once for the whole group; it walks

    lo        full_lo                  full_hi            hi      key positions, multiples of TILE (hi excepted)
    | window edge |  every row sees all    | causal edge  |
      masked         no masks at all         masked
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
def find_sequence(query_starts, first_seq, num_seqs, block, BLOCK_Q: tl.constexpr):
    """The sequence (counted from first_seq) that owns a block of BLOCK_Q tokens.

    Sequence i's blocks begin at (rows before it) // BLOCK_Q + i: an upper bound that needs no host work. Some blocks
    at a sequence's end are then empty and leave.
    """
    origin = tl.load(query_starts + first_seq)
    low = 0
    high = num_seqs
    while low < high:  # the last sequence whose first block is <= block
        middle = (low + high) // 2
        first_block = (tl.load(query_starts + first_seq + middle) - origin) // BLOCK_Q + middle
        if first_block <= block:
            low = middle + 1
        else:
            high = middle
    seq = low - 1
    first_block = (tl.load(query_starts + first_seq + seq) - origin) // BLOCK_Q + seq
    return first_seq + seq, block - first_block


@triton.jit
def attend_range(
    acc,
    total,
    peak,
    q,
    score_scale,
    cap_log2,
    row_position,
    window,
    start,
    stop,
    seq_len,
    table,
    key_base,
    value_base,
    stride_key_block,
    stride_key_token,
    stride_value_block,
    stride_value_token,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    KV_FP8: tl.constexpr,
    SAME_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold the keys of [start, stop), tile by tile, into the running softmax."""
    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    for tile in range(start, stop, TILE):
        position = tile + tl.arange(0, TILE)
        in_range = position < seq_len
        key_rows = slot_offsets(table, position, in_range, stride_key_block, stride_key_token, PAGE, MASKED)
        k = widen(load_rows(key_base, key_rows, d, in_range, D, D_PAD, MASKED), KV_FP8)  # [TILE, D_PAD]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * score_scale[:, None]
        if HAS_CAP:
            scores = soft_cap(scores, cap_log2)
        if MASKED:
            visible = position[None, :] <= row_position[:, None]
            if HAS_WINDOW:
                visible = visible & (row_position[:, None] - position[None, :] < window)
            scores = tl.where(visible, scores, float("-inf"))
        value_rows = key_rows
        if not SAME_ROWS:
            value_rows = slot_offsets(table, position, in_range, stride_value_block, stride_value_token, PAGE, MASKED)
        v = widen(load_rows(value_base, value_rows, dv, in_range, DV, DV_PAD, MASKED), KV_FP8)  # [TILE, DV_PAD]
        # Before its window begins, a row has seen nothing: only masked tiles can meet that.
        acc, total, peak = softmax_step(scores, v, acc, total, peak, PRECISION, MASKED and HAS_WINDOW)
    return acc, total, peak


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "window"])
def paged_prefill(
    out,  # [T, Hq, DV]
    query,  # [T, Hq, D]
    keys,  # [blocks, PAGE, Hkv, D] by strides
    values,  # [blocks, PAGE, Hkv, DV] by strides
    query_starts,  # int32 [S + 1]
    block_tables,  # int32 [S, max_blocks]
    seq_lens,  # int32 [S]
    sinks,  # [Hq] or None
    key_scales,  # fp32 [Hkv] or None
    value_scales,  # fp32 [Hkv] or None
    first_seq,
    num_seqs,
    scale_log2,
    cap_log2,
    window,
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
    BLOCK_G: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    KV_FP8: tl.constexpr,
    SAME_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (token blocks, Hkv * head blocks). Late blocks, which see most keys, start first."""
    BLOCK_Q: tl.constexpr = ROWS // BLOCK_G
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    seq, local_block = find_sequence(query_starts, first_seq, num_seqs, block, BLOCK_Q)
    row_start = tl.load(query_starts + seq)
    num_rows = tl.load(query_starts + seq + 1) - row_start
    first_token = local_block * BLOCK_Q
    if first_token >= num_rows:
        return
    seq_len = tl.load(seq_lens + seq)
    context = seq_len - num_rows  # keys before this sequence's first row; negative only for padding (seq_len 0)

    row = tl.arange(0, ROWS)
    token = first_token + row // BLOCK_G
    in_group = (tl.program_id(1) % HEAD_BLOCKS) * BLOCK_G + row % BLOCK_G
    row_ok = (row // BLOCK_G < BLOCK_Q) & (token < num_rows) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    row_position = context + token
    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    row_index = (row_start + token).to(tl.int64)
    q = tl.load(
        query + row_index[:, None] * stride_query_row + head[:, None] * stride_query_head + d[None, :],
        mask=row_ok[:, None] & (d < D)[None, :],
        other=0.0,
    )  # [ROWS, D_PAD]
    q, q_factor = fit_query(q, KV_FP8)
    score_scale = q_factor * scale_log2
    if key_scales is not None:
        score_scale = score_scale * tl.load(key_scales + kv_head)

    acc = tl.zeros([ROWS, DV_PAD], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    if sinks is not None:
        peak = tl.load(sinks + head, mask=row_ok, other=0.0).to(tl.float32) * 1.4426950408889634
        total = tl.full([ROWS], 1.0, tl.float32)

    first_position = context + first_token
    last_position = context + tl.minimum(first_token + BLOCK_Q, num_rows) - 1
    hi = tl.minimum(last_position + 1, seq_len)
    full_hi = tl.maximum(first_position + 1, 0) // TILE * TILE
    full_lo = 0
    table = block_tables + seq.to(tl.int64) * stride_table
    key_base = keys + kv_head * stride_key_head
    value_base = values + kv_head * stride_value_head
    if HAS_WINDOW:
        lo = tl.maximum(first_position - window + 1, 0) // TILE * TILE
        full_lo = tl.cdiv(tl.maximum(last_position - window + 1, 0), TILE) * TILE
        full_hi = tl.maximum(full_lo, full_hi)
        # A window narrower than the block has no full tiles: the first loop then takes the causal edge too.
        acc, total, peak = attend_range(
            acc, total, peak, q, score_scale, cap_log2, row_position, window, lo, tl.minimum(full_lo, hi), seq_len,
            table, key_base, value_base,
            stride_key_block, stride_key_token, stride_value_block, stride_value_token,
            D, D_PAD, DV, DV_PAD, PAGE, TILE, HAS_WINDOW, HAS_CAP, KV_FP8, SAME_ROWS, PRECISION, True,
        )  # fmt: skip
    acc, total, peak = attend_range(
        acc, total, peak, q, score_scale, cap_log2, row_position, window, full_lo, full_hi, seq_len,
        table, key_base, value_base,
        stride_key_block, stride_key_token, stride_value_block, stride_value_token,
        D, D_PAD, DV, DV_PAD, PAGE, TILE, HAS_WINDOW, HAS_CAP, KV_FP8, SAME_ROWS, PRECISION, False,
    )  # fmt: skip
    acc, total, peak = attend_range(
        acc, total, peak, q, score_scale, cap_log2, row_position, window, full_hi, hi, seq_len,
        table, key_base, value_base,
        stride_key_block, stride_key_token, stride_value_block, stride_value_token,
        D, D_PAD, DV, DV_PAD, PAGE, TILE, HAS_WINDOW, HAS_CAP, KV_FP8, SAME_ROWS, PRECISION, True,
    )  # fmt: skip

    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if value_scales is not None:
        result = result * tl.load(value_scales + kv_head)
    tl.store(
        out + row_index[:, None] * stride_out_row + head[:, None] * stride_out_head + dv[None, :],
        result.to(out.dtype.element_ty),
        mask=row_ok[:, None] & (dv < DV)[None, :],
    )
