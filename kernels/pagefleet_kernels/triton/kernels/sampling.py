"""Sampling in four launches: shape the logits, find each row's threshold, sum per chunk, pick the token.

    weight_i = exp((x_i - max x) / temperature),  x = penalised logits
    token    = the first, in the order of ids, where the running sum of the kept weights passes u x their whole sum
    u        = 53 bits of Philox4x32-10(key = seed, counter = (position, 0, 0)), in [0, 1)

So a draw is keyed by (seed, position) alone, and it is the draw that the CPU makes: the same numbers, the same order of
rules (top-k, top-p, min-p), the same order of tokens. top-k and top-p become a threshold per row and how many of the
tokens that tie with it are kept, lower ids first; it is found by bisection on the bits of x: floats sort like
sign-magnitude integers.
"""

import triton
import triton.language as tl


@triton.jit
def shape_logits(
    shaped,  # fp32 [B, V]
    chunk_peak,  # fp32 [B, C]
    logits,  # [B, V]
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
        factor = tl.load(repetition + row) + tl.zeros([BLOCK], tl.float32)
        x = tl.where(seen, tl.where(x > 0.0, tl.div_rn(x, factor), x * factor), x)
        taken = tl.load(presence + row) + tl.load(frequency + row) * count.to(tl.float32)
        x = tl.where(count > 0, x - taken, x)
    tl.store(shaped + row * vocab + token, x, mask=ok)
    tl.store(chunk_peak + row * chunks + tl.program_id(1), tl.max(x, axis=0))


@triton.jit
def weight_of(x, peak, heat):
    """Probability relative to the likeliest token's; 0 where x is -inf."""
    return tl.exp((x - tl.where(peak == float("-inf"), 0.0, peak)) / tl.maximum(heat, 1.1754943508222875e-38))


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
def measure(row, vocab, peak, heat, floor_key, one, two, three, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Count (or weight) of the row's tokens at or above each of three keys and floor_key."""
    above_one = tl.zeros([BLOCK], tl.float32)
    above_two = tl.zeros([BLOCK], tl.float32)
    above_three = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < vocab, other=float("-inf"))
        key = sort_key(x).to(tl.int64)
        if BY_MASS:
            amount = weight_of(x, peak, heat)
        else:
            amount = tl.where(token < vocab, 1.0, 0.0)
        amount = tl.where(key >= floor_key, amount, 0.0)
        above_one += tl.where(key >= one, amount, 0.0)
        above_two += tl.where(key >= two, amount, 0.0)
        above_three += tl.where(key >= three, amount, 0.0)
    return tl.sum(above_one, axis=0), tl.sum(above_two, axis=0), tl.sum(above_three, axis=0)


@triton.jit
def largest_key_reaching(row, vocab, peak, heat, floor_key, wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key, not below floor_key, at or above which the row holds `wanted` tokens (or weight).

    Four-way search over at most 2^32 keys: <= 17 passes. The passes stay in L2; three pivots cost about as much as one.
    """
    low = floor_key  # reaches `wanted`, or nothing does
    high = sort_key(peak).to(tl.int64) + 1  # does not
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        one = low + step
        two = tl.minimum(one + step, high - 1)
        three = tl.minimum(two + step, high - 1)
        at_one, at_two, at_three = measure(row, vocab, peak, heat, floor_key, one, two, three, BY_MASS, BLOCK)
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
    threshold,  # fp32 [B]: tokens above it are kept
    tie_limit,  # int32 [B]: of the tokens at it, so many, lower ids first
    row_peak,  # fp32 [B]
    shaped,  # fp32 [B, V]
    chunk_peak,  # fp32 [B, C]
    temperature,  # fp32 [B]; 0: greedy
    top_k,  # int32 [B]; 0 keeps all
    top_p,  # fp32 [B]; 1 keeps all
    vocab,
    chunks,
    CHUNKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B,). Rows that ask for no mask cost one load; top-k is applied first, top-p to what it left."""
    index = tl.program_id(0).to(tl.int64)
    row = shaped + index * vocab
    chunk = tl.arange(0, CHUNKS_PAD)
    peak = tl.max(tl.load(chunk_peak + index * chunks + chunk, mask=chunk < chunks, other=float("-inf")), axis=0)
    heat = tl.load(temperature + index)
    wanted_count = tl.load(top_k + index)
    share = tl.load(top_p + index)
    lowest_key = sort_key(tl.full([], float("-inf"), tl.float32)).to(tl.int64)
    key = lowest_key
    limit = tl.full([], 2147483647.0, tl.float32)
    if (heat > 0.0) & (peak > float("-inf")) & (peak < float("inf")):
        if (wanted_count > 0) & (wanted_count < vocab):
            key = largest_key_reaching(row, vocab, peak, heat, lowest_key, wanted_count.to(tl.float32), False, BLOCK)
        if share < 1.0:
            mass, _, _ = measure(row, vocab, peak, heat, key, key, key, key, True, BLOCK)
            wanted = share * mass
            key = largest_key_reaching(row, vocab, peak, heat, key, wanted, True, BLOCK)
            above, _, _ = measure(row, vocab, peak, heat, key + 1, key + 1, key + 1, key + 1, True, BLOCK)
            each = weight_of(key_value(key), peak, heat)
            limit = tl.where(each > 0.0, tl.ceil((wanted - above) / each), limit)
            limit = tl.minimum(tl.maximum(limit, 1.0), 2147483520.0)
    tl.store(threshold + index, key_value(key))
    tl.store(tie_limit + index, tl.minimum(limit, 2147483520.0).to(tl.int32))
    tl.store(row_peak + index, peak)


@triton.jit
def uniform(seed, position):
    """In [0, 1), 53 random bits, as the CPU draws them."""
    zero = tl.zeros([1], tl.uint32)
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + (position >> 32).to(tl.uint32)
    w0, w1, _, _ = tl.philox(seed, low, high, zero, zero)
    bits = ((w1.to(tl.uint64) << 32) | w0.to(tl.uint64)) >> 11
    return tl.sum(bits.to(tl.float64) * 1.1102230246251565e-16, axis=0)


@triton.jit
def sum_chunks(
    chunk_mass,  # fp64 [B, C]: weights above the threshold
    chunk_ties,  # int32 [B, C]: tokens at it
    best_score,  # fp32 [B, C]
    best_token,  # int32 [B, C]
    shaped,  # fp32 [B, V]
    threshold,  # fp32 [B]
    row_peak,  # fp32 [B]
    temperature,  # fp32 [B]
    min_p,  # fp32 [B]; 0 keeps all
    vocab,
    chunks,
    BLOCK: tl.constexpr,
):
    """Grid (B, C): what pick_token needs of each chunk; of greedy rows the best (score, lowest token id)."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    token = first + tl.arange(0, BLOCK)
    x = tl.load(shaped + row * vocab + token, mask=token < vocab, other=float("-inf"))
    target = row * chunks + tl.program_id(1)
    heat = tl.load(temperature + row)
    peak = tl.load(row_peak + row)
    if (heat > 0.0) & (peak < float("inf")):
        bound = tl.load(threshold + row)
        weight = weight_of(x, peak, heat)
        weight = tl.where(weight >= tl.load(min_p + row), weight, 0.0)
        tl.store(chunk_mass + target, tl.sum(tl.where(x > bound, weight, 0.0).to(tl.float64), axis=0))
        tl.store(chunk_ties + target, tl.sum(((x == bound) & (weight > 0.0)).to(tl.int32), axis=0))
    else:
        score, index = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best_score + target, score)
        tl.store(best_token + target, first + index)


@triton.jit
def pick_token(
    tokens,  # int64 [B]
    chunk_mass,
    chunk_ties,
    best_score,
    best_token,
    shaped,
    threshold,
    tie_limit,
    row_peak,
    temperature,
    min_p,
    seeds,  # int64 [B]
    positions,  # int64 [B]
    vocab,
    chunks,
    CHUNKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B,). A row whose logits are all -inf gives token 0."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS_PAD)
    ok = chunk < chunks
    heat = tl.load(temperature + row)
    peak = tl.load(row_peak + row)
    if (heat > 0.0) & (peak < float("inf")):
        bound = tl.load(threshold + row)
        limit = tl.load(tie_limit + row)
        least = tl.load(min_p + row)
        tie_weight = weight_of(bound, peak, heat)
        tie_weight = tl.where(tie_weight >= least, tie_weight, 0.0)
        ties = tl.load(chunk_ties + row * chunks + chunk, mask=ok, other=0)
        earlier = tl.cumsum(ties, axis=0) - ties
        kept = tl.minimum(tl.maximum(limit - earlier, 0), ties)
        mass = tl.load(chunk_mass + row * chunks + chunk, mask=ok, other=0.0)
        mass += kept.to(tl.float64) * tie_weight.to(tl.float64)
        running = tl.cumsum(mass, axis=0)
        whole = tl.max(running, axis=0)
        number = uniform(tl.load(seeds + row), tl.load(positions + row))
        # Below the whole, whatever the product rounds to: some weight is beyond it.
        target = tl.minimum(number * whole, whole * 0.9999999999999999)
        which = tl.min(tl.where(running > target, chunk, chunks - 1), axis=0)
        before = tl.sum(tl.where(chunk == which - 1, running, 0.0), axis=0)
        rank = tl.sum(tl.where(chunk == which, earlier, 0), axis=0)
        token = which * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(shaped + row * vocab + token, mask=token < vocab, other=float("-inf"))
        weight = weight_of(x, peak, heat)
        weight = tl.where(weight >= least, weight, 0.0)
        tie = ((x == bound) & (weight > 0.0)).to(tl.int32)
        rank += tl.cumsum(tie, axis=0) - tie
        drawable = (weight > 0.0) & ((x > bound) | ((tie > 0) & (rank < limit)))
        sums = before + tl.cumsum(tl.where(drawable, weight, 0.0).to(tl.float64), axis=0)
        passed = tl.min(tl.where(drawable & (sums > target), token, 2147483647), axis=0)
        # Rounding may leave the sum a hair short: the last token that can be drawn there.
        last = tl.max(tl.where(drawable, token, 0), axis=0)
        tl.store(tokens + row, tl.where(passed < 2147483647, passed, last).to(tl.int64))
    else:
        score = tl.load(best_score + row * chunks + chunk, mask=ok, other=float("-inf"))
        best = tl.max(score, axis=0)
        candidate = tl.load(best_token + row * chunks + chunk, mask=ok, other=0x7FFFFFFF)
        # Chunks ascend, so the lowest id among equals is the leftmost chunk's.
        tl.store(tokens + row, tl.min(tl.where(score == best, candidate, 0x7FFFFFFF), axis=0).to(tl.int64))
