"""KV memory: store rows at their slots (rotated and quantised on the way), copy whole blocks.

A slot is block * PAGE + offset; slot -1 stores nothing. fp8 e4m3 holds x / scale, clamped to +-448 (the cast itself
would turn larger values into NaN).
"""

import triton
import triton.language as tl


@triton.jit
def store_rows(
    base,
    slot,
    rows,  # [H, W] fp32
    heads,
    head_ok,
    columns,
    column_ok,
    scales,  # fp32 [Hkv] or None
    stride_block,
    stride_token,
    stride_head,
    PAGE: tl.constexpr,
):
    """Store the slot's heads, quantised where there are scales."""
    if scales is not None:
        scale = tl.load(scales + heads, mask=head_ok, other=1.0)
        rows = tl.minimum(tl.maximum(rows / scale[:, None], -448.0), 448.0)
    target = base + slot // PAGE * stride_block + slot % PAGE * stride_token
    tl.store(
        target + heads[:, None] * stride_head + columns[None, :],
        rows.to(base.dtype.element_ty),
        mask=head_ok[:, None] & column_ok[None, :],
    )


@triton.jit
def write_kv(
    keys,
    values,
    key,  # [T, Hkv, D]
    value,  # [T, Hkv, DV]
    slot_mapping,  # int64 [T]
    key_scales,
    value_scales,
    stride_key_block,
    stride_key_token,
    stride_key_head,
    stride_value_block,
    stride_value_token,
    stride_value_head,
    stride_new_key_row,
    stride_new_key_head,
    stride_new_value_row,
    stride_new_value_head,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Grid (T, head blocks)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, D_PAD)
    ok = (head < HEADS)[:, None] & (d < D)[None, :]
    rows = tl.load(
        key + token * stride_new_key_row + head[:, None] * stride_new_key_head + d[None, :], mask=ok, other=0.0
    )
    store_rows(
        keys, slot, rows.to(tl.float32), head, head < HEADS, d, d < D, key_scales,
        stride_key_block, stride_key_token, stride_key_head, PAGE,
    )  # fmt: skip
    dv = tl.arange(0, DV_PAD)
    ok = (head < HEADS)[:, None] & (dv < DV)[None, :]
    rows = tl.load(
        value + token * stride_new_value_row + head[:, None] * stride_new_value_head + dv[None, :], mask=ok, other=0.0
    )
    store_rows(
        values, slot, rows.to(tl.float32), head, head < HEADS, dv, dv < DV, value_scales,
        stride_value_block, stride_value_token, stride_value_head, PAGE,
    )  # fmt: skip


@triton.jit
def rotated_halves(
    source,  # of one token: [H, D] by stride
    stride_head,
    heads,
    head_ok,
    norm_weight,  # [D] or None
    norm_offset,
    eps,
    cos,
    sin,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """(first [H, HALF_PAD], second [H, HALF_PAD], rest [H, REST_PAD]) in fp32, after the optional RMS norm over D.

    Pair i is columns (i, i + ROTARY / 2), or (2 i, 2 i + 1) when interleaved; columns >= ROTARY pass through.
    """
    HALF: tl.constexpr = ROTARY // 2
    i = tl.arange(0, HALF_PAD)
    r = tl.arange(0, REST_PAD)
    half_ok = head_ok[:, None] & (i < HALF)[None, :]
    rest_ok = head_ok[:, None] & (r < D - ROTARY)[None, :]
    if INTERLEAVED:
        one = 2 * i
        two = 2 * i + 1
    else:
        one = i
        two = i + HALF
    base = source + heads[:, None] * stride_head
    first = tl.load(base + one[None, :], mask=half_ok, other=0.0).to(tl.float32)
    second = tl.load(base + two[None, :], mask=half_ok, other=0.0).to(tl.float32)
    rest = tl.load(base + ROTARY + r[None, :], mask=rest_ok, other=0.0).to(tl.float32)
    if norm_weight is not None:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1) + tl.sum(rest * rest, axis=1)
        inverse = tl.rsqrt(squares / D + eps)[:, None]
        weight = tl.load(norm_weight + one, mask=i < HALF, other=0.0).to(tl.float32) + norm_offset
        first = first * inverse * weight[None, :]
        weight = tl.load(norm_weight + two, mask=i < HALF, other=0.0).to(tl.float32) + norm_offset
        second = second * inverse * weight[None, :]
        weight = tl.load(norm_weight + ROTARY + r, mask=r < D - ROTARY, other=0.0).to(tl.float32) + norm_offset
        rest = rest * inverse * weight[None, :]
    turned = first * cos[None, :] - second * sin[None, :]
    second = second * cos[None, :] + first * sin[None, :]
    return turned, second, rest


@triton.jit(do_not_specialize=["num_positions"])
def rope_write_kv(
    query_out,  # [T, Hq, D]
    query,  # [T, Hq, D]
    key,  # [T, Hkv, D]
    value,  # [T, Hkv, DV]
    keys,
    values,
    positions,  # int64 [T]: rows of cos_sin
    cos_sin,  # fp32 [positions, ROTARY]: cos | sin
    slot_mapping,  # int64 [T]
    query_norm,  # [D] or None
    key_norm,  # [D] or None
    key_scales,
    value_scales,
    num_positions,
    norm_offset,
    eps,
    stride_out_row,
    stride_out_head,
    stride_query_row,
    stride_query_head,
    stride_new_key_row,
    stride_new_key_head,
    stride_new_value_row,
    stride_new_value_head,
    stride_key_block,
    stride_key_token,
    stride_key_head,
    stride_value_block,
    stride_value_token,
    stride_value_head,
    QUERY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Grid (T, blocks of query heads | blocks of key heads | blocks of value heads): q, k, v are read once."""
    QUERY_BLOCKS: tl.constexpr = (QUERY_HEADS + BLOCK_H - 1) // BLOCK_H
    KEY_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    HALF: tl.constexpr = ROTARY // 2
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    lanes = tl.arange(0, BLOCK_H)
    if block >= QUERY_BLOCKS + KEY_BLOCKS:
        if slot < 0:
            return
        head = (block - QUERY_BLOCKS - KEY_BLOCKS) * BLOCK_H + lanes
        dv = tl.arange(0, DV_PAD)
        ok = (head < HEADS)[:, None] & (dv < DV)[None, :]
        rows = tl.load(
            value + token * stride_new_value_row + head[:, None] * stride_new_value_head + dv[None, :],
            mask=ok,
            other=0.0,
        )
        store_rows(
            values, slot, rows.to(tl.float32), head, head < HEADS, dv, dv < DV, value_scales,
            stride_value_block, stride_value_token, stride_value_head, PAGE,
        )  # fmt: skip
        return

    i = tl.arange(0, HALF_PAD)
    r = tl.arange(0, REST_PAD)
    if INTERLEAVED:
        one = 2 * i
        two = 2 * i + 1
    else:
        one = i
        two = i + HALF
    position = tl.load(positions + token)
    angles = tl.where((position >= 0) & (position < num_positions), HALF, 0)  # 0: nothing is read, all becomes NaN
    table = cos_sin + position * ROTARY
    cos = tl.load(table + i, mask=i < angles, other=float("nan"))
    sin = tl.load(table + HALF + i, mask=i < angles, other=float("nan"))
    if block < QUERY_BLOCKS:
        head = block * BLOCK_H + lanes
        head_ok = head < QUERY_HEADS
        first, second, rest = rotated_halves(
            query + token * stride_query_row, stride_query_head, head, head_ok, query_norm, norm_offset, eps, cos, sin,
            D, ROTARY, HALF_PAD, REST_PAD, INTERLEAVED,
        )  # fmt: skip
        half_ok = head_ok[:, None] & (i < HALF)[None, :]
        target = query_out + token * stride_out_row + head[:, None] * stride_out_head
        kind = query_out.dtype.element_ty
        tl.store(target + one[None, :], first.to(kind), mask=half_ok)
        tl.store(target + two[None, :], second.to(kind), mask=half_ok)
        if ROTARY < D:
            tl.store(target + ROTARY + r[None, :], rest.to(kind), mask=head_ok[:, None] & (r < D - ROTARY)[None, :])
    else:
        if slot < 0:
            return
        head = (block - QUERY_BLOCKS) * BLOCK_H + lanes
        head_ok = head < HEADS
        first, second, rest = rotated_halves(
            key + token * stride_new_key_row, stride_new_key_head, head, head_ok, key_norm, norm_offset, eps, cos, sin,
            D, ROTARY, HALF_PAD, REST_PAD, INTERLEAVED,
        )  # fmt: skip
        store_rows(
            keys, slot, first, head, head_ok, one, i < HALF, key_scales,
            stride_key_block, stride_key_token, stride_key_head, PAGE,
        )  # fmt: skip
        store_rows(
            keys, slot, second, head, head_ok, two, i < HALF, key_scales,
            stride_key_block, stride_key_token, stride_key_head, PAGE,
        )  # fmt: skip
        if ROTARY < D:
            store_rows(
                keys, slot, rest, head, head_ok, ROTARY + r, r < D - ROTARY, key_scales,
                stride_key_block, stride_key_token, stride_key_head, PAGE,
            )  # fmt: skip


@triton.jit
def copy_blocks(memory, pairs, block_words, stride_block, WORDS: tl.constexpr):
    """memory: integer words [blocks, block_words]; pairs int64 [N, 2] (source, destination). Grid (N, pieces)."""
    source = tl.load(pairs + 2 * tl.program_id(0))
    destination = tl.load(pairs + 2 * tl.program_id(0) + 1)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    ok = word < block_words
    piece = tl.load(memory + source * stride_block + word, mask=ok, other=0)
    tl.store(memory + destination * stride_block + word, piece, mask=ok)
