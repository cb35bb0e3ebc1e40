"""Sampling in four launches: shape the logits, find each row's threshold, draw per chunk, pick the best chunk.

token = argmax over kept i of (x_i + g_i),  x = penalised logits / temperature,  g_i = -log(-log(1 - v_i))  (Gumbel-max)
v_i = (word + 1/2) / 2^32
word = Philox4x32-10(key = seed, counter = (i // 4, position % 2^31, position // 2^31, 0))[i % 4]

So a draw is keyed by (seed, position, token id): it depends on no other row, slot or batch. top-k, top-p and min-p
become one threshold per row (x >= threshold is kept; ties at the threshold stay), found by bisection on the bits of x:
floats sort like sign-magnitude integers.
"""

import triton
import triton.language as tl


@triton.jit
def shape_logits(
    shaped,  # fp32 [B, V]
    chunk_peak,  # fp32 [B, C]
    chunk_mass,  # fp32 [B, C]: sum of exp(x - chunk_peak)
    logits,  # [B, V]
    temperature,  # fp32 [B]; 0: greedy, not divided
    repetition,  # fp32 [B] or None
    presence,  # fp32 [B]
    frequency,  # fp32 [B]
    output_counts,  # int32 [B, V]: times a token was generated
    prompt_seen,  # int8 [B, V]: 1 if a token is in the prompt
    vocab,
    chunks,
    stride_logits,
    BLOCK: tl.constexpr,
):
    """Grid (B, C). A NaN logit becomes -inf: it is never drawn."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = token < vocab
    x = tl.load(logits + row * stride_logits + token, mask=ok, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    if repetition is not None:
        count = tl.load(output_counts + row * vocab + token, mask=ok, other=0)
        seen = (count > 0) | (tl.load(prompt_seen + row * vocab + token, mask=ok, other=0) > 0)
        factor = tl.load(repetition + row)
        x = tl.where(seen, tl.where(x > 0.0, x / factor, x * factor), x)
        x -= tl.load(frequency + row) * count.to(tl.float32)
        x -= tl.load(presence + row) * (count > 0).to(tl.float32)
    heat = tl.load(temperature + row)
    x = x / tl.where(heat > 0.0, heat, 1.0)
    tl.store(shaped + row * vocab + token, x, mask=ok)
    peak = tl.max(x, axis=0)
    mass = tl.sum(tl.exp(x - tl.where(peak == float("-inf"), 0.0, peak)), axis=0)
    tl.store(chunk_peak + row * chunks + tl.program_id(1), peak)
    tl.store(chunk_mass + row * chunks + tl.program_id(1), mass)


@triton.jit
def sort_key(x):
    """int32 that orders like x (no NaN)."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """The float whose sort_key is key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def measure(row, vocab, peak, floor_key, one, two, three, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Count (or exp mass, relative to peak) of the row's tokens at or above each of three keys and floor_key."""
    above_one = tl.zeros([BLOCK], tl.float32)
    above_two = tl.zeros([BLOCK], tl.float32)
    above_three = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < vocab, other=float("-inf"))
        key = sort_key(x).to(tl.int64)
        if BY_MASS:
            weight = tl.exp(x - peak)
        else:
            weight = tl.where(token < vocab, 1.0, 0.0)
        weight = tl.where(key >= floor_key, weight, 0.0)
        above_one += tl.where(key >= one, weight, 0.0)
        above_two += tl.where(key >= two, weight, 0.0)
        above_three += tl.where(key >= three, weight, 0.0)
    return tl.sum(above_one, axis=0), tl.sum(above_two, axis=0), tl.sum(above_three, axis=0)


@triton.jit
def largest_key_reaching(row, vocab, peak, floor_key, wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key, not below floor_key, at or above which the row holds `wanted` tokens (or mass).

    Four-way search over at most 2^32 keys: <= 17 passes. The passes stay in L2; three pivots cost about as much as one.
    """
    low = floor_key  # reaches `wanted`, or nothing does
    high = sort_key(peak).to(tl.int64) + 1  # does not
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        one = low + step
        two = tl.minimum(one + step, high - 1)
        three = tl.minimum(two + step, high - 1)
        at_one, at_two, at_three = measure(row, vocab, peak, floor_key, one, two, three, BY_MASS, BLOCK)
        # The measure falls as the key rises.
        if at_three >= wanted:
            low = three
        elif at_two >= wanted:
            low = two
            high = three
        elif at_one >= wanted:
            low = one
            high = two
        else:
            high = one
    return low


@triton.jit
def find_threshold(
    threshold,  # fp32 [B]
    shaped,  # fp32 [B, V]
    chunk_peak,  # fp32 [B, C]
    chunk_mass,  # fp32 [B, C]
    temperature,  # fp32 [B]
    top_k,  # int32 [B]; 0 keeps all
    top_p,  # fp32 [B]; 1 keeps all
    min_p,  # fp32 [B]; 0 keeps all
    vocab,
    chunks,
    CHUNKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B,). Rows that ask for no mask cost one load; top-k is applied first, top-p to what it left, then min-p."""
    index = tl.program_id(0).to(tl.int64)
    row = shaped + index * vocab
    chunk = tl.arange(0, CHUNKS_PAD)
    peaks = tl.load(chunk_peak + index * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    peak = tl.max(peaks, axis=0)
    heat = tl.load(temperature + index)
    wanted_count = tl.load(top_k + index)
    wanted_mass = tl.load(top_p + index)
    relative = tl.load(min_p + index)
    lowest_key = sort_key(tl.full([], float("-inf"), tl.float32)).to(tl.int64)
    key = lowest_key
    if (heat > 0.0) & (peak > float("-inf")):
        if (wanted_count > 0) & (wanted_count < vocab):
            key = largest_key_reaching(row, vocab, peak, lowest_key, wanted_count.to(tl.float32), False, BLOCK)
        if wanted_mass < 1.0:
            masses = tl.load(chunk_mass + index * chunks + chunk, mask=chunk < chunks, other=0.0)
            mass = tl.sum(masses * tl.exp(peaks - peak), axis=0)
            if key > lowest_key:
                mass, _, _ = measure(row, vocab, peak, key, key, key, key, True, BLOCK)
            key = largest_key_reaching(row, vocab, peak, key, wanted_mass * mass, True, BLOCK)
    bound = key_value(key)
    if (heat > 0.0) & (relative > 0.0):
        bound = tl.maximum(bound, peak + tl.log(relative))
    tl.store(threshold + index, bound)


@triton.jit
def gumbel(seed, position, first_token, BLOCK: tl.constexpr):
    """Standard Gumbel noise [BLOCK] of tokens first_token + 0..BLOCK-1; first_token is a multiple of 4."""
    quad = first_token // 4 + tl.arange(0, BLOCK // 4)
    zero = quad * 0
    low = zero + (position & 0x7FFFFFFF).to(tl.int32)
    high = zero + (position >> 31).to(tl.int32)
    w0, w1, w2, w3 = tl.philox(seed, quad, low, high, zero)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])
    v = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    v = tl.minimum(v, 0.99999994)
    # -log(1 - v), by its series where 1 - v would lose the bits of a small v.
    exponential = tl.where(v < 0.001, v * (1.0 + v * (0.5 + v * 0.3333333333)), -tl.log(1.0 - v))
    return -tl.log(exponential)


@triton.jit
def draw_chunks(
    best_score,  # fp32 [B, C]
    best_token,  # int32 [B, C]
    shaped,  # fp32 [B, V]
    threshold,  # fp32 [B]
    temperature,  # fp32 [B]
    seeds,  # int64 [B]
    positions,  # int64 [B]
    vocab,
    chunks,
    BLOCK: tl.constexpr,
):
    """Grid (B, C): each chunk's best (score, lowest token id)."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    token = first + tl.arange(0, BLOCK)
    x = tl.load(shaped + row * vocab + token, mask=token < vocab, other=float("-inf"))
    if tl.load(temperature + row) > 0.0:
        kept = x >= tl.load(threshold + row)
        noise = gumbel(tl.load(seeds + row), tl.load(positions + row), first, BLOCK)
        x = tl.where(kept, x + noise, float("-inf"))
    score, index = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_score + row * chunks + tl.program_id(1), score)
    tl.store(best_token + row * chunks + tl.program_id(1), first + index)


@triton.jit
def pick_token(tokens, best_score, best_token, chunks, CHUNKS_PAD: tl.constexpr):
    """Grid (B,): tokens int64 [B]. A row whose logits are all -inf gives token 0."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS_PAD)
    score = tl.load(best_score + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    best = tl.max(score, axis=0)
    token = tl.load(best_token + row * chunks + chunk, mask=chunk < chunks, other=0x7FFFFFFF)
    # Chunks ascend, so the lowest id among equals is the leftmost chunk's.
    tl.store(tokens + row, tl.min(tl.where(score == best, token, 0x7FFFFFFF), axis=0).to(tl.int64))
