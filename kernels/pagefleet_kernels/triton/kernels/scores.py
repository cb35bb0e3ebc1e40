"""Pieces that decode and prefill share: page lookup, score shaping, one online-softmax step."""

import triton
import triton.language as tl


@triton.jit
def slot_offsets(table, positions, in_range, stride_block, stride_token, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """Element offset [TILE] of each key position's row; entries of the table beyond a masked range are not read."""
    if MASKED:
        block = tl.load(table + positions // PAGE, mask=in_range, other=0)
    else:
        block = tl.load(table + positions // PAGE)
    return block.to(tl.int64) * stride_block + (positions % PAGE) * stride_token


@triton.jit
def load_rows(
    base,
    offsets,
    columns,
    in_range,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """[TILE, PADDED] rows; columns >= WIDTH and rows out of a masked range are 0 (a slot nobody wrote may hold NaN)."""
    pointers = base + offsets[:, None] + columns[None, :]
    if MASKED:
        if WIDTH == PADDED:
            return tl.load(pointers, mask=in_range[:, None], other=0.0)
        return tl.load(pointers, mask=in_range[:, None] & (columns < WIDTH)[None, :], other=0.0)
    if WIDTH == PADDED:
        return tl.load(pointers)
    return tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)


@triton.jit
def soft_cap(scores, cap_log2):
    """cap * tanh(s / cap) in base 2: scores and cap_log2 both carry the factor log2(e)."""
    # tanh(x) = 1 - 2 / (1 + e^2x); e^2x = 2^(2 x log2e), and x log2e = scores / cap with cap = cap_log2 / log2e.
    grown = tl.exp2(scores * (2.8853900817779268 / cap_log2))
    return cap_log2 * (1.0 - 2.0 / (1.0 + grown))


@triton.jit
def fit_query(query, KV_FP8: tl.constexpr):
    """Query rows as the tensor cores want them, and the factor [ROWS] that undoes it.

    fp8 keys become fp16 (exact, one instruction for two); a bf16 query may not fit fp16, so rows are scaled to <= 1.
    """
    if KV_FP8:
        wide = query.to(tl.float32)
        largest = tl.max(tl.abs(wide), axis=1)
        factor = tl.where(largest > 0.0, largest, 1.0)
        return (wide / factor[:, None]).to(tl.float16), factor
    else:  # Triton compiles what follows a return too, and wants one type
        return query, tl.full([query.shape[0]], 1.0, tl.float32)


@triton.jit
def widen(tile, KV_FP8: tl.constexpr):
    """fp8 e4m3 -> fp16 is exact; other types go to the dot as they are."""
    if KV_FP8:
        return tile.to(tl.float16)
    else:
        return tile


@triton.jit
def softmax_step(scores, values, acc, total, peak, PRECISION: tl.constexpr, GUARDED: tl.constexpr):
    """Fold scores [ROWS, TILE] (base 2, masked ones -inf) and values [TILE, DV] into the running (acc, total, peak).

    GUARDED: some row may have seen no key yet, so its peak is -inf and must not be subtracted from -inf.
    """
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    if GUARDED:
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    else:
        shift = new_peak
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, axis=1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return acc, total, new_peak
