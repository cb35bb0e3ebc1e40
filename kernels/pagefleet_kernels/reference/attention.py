"""Masked softmax attention over gathered blocks, in float32 (float64 for float64 input), in bounded memory.

Two shapes of work: decode takes a group of sequences at once, padded to the longest of the group; prefill takes one
sequence and walks its rows in tiles, each of which gathers only the keys that it can see. Both end in `_attend`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pagefleet_kernels.batch import AttentionBatch
from pagefleet_kernels.reference.cache import ReferenceCache

MAX_GATHERED_ELEMENTS = 1 << 23
"""Elements of K (or of V) that one gather holds at most, unless a single sequence needs more: 32 MiB in float32."""
MAX_SCORE_ELEMENTS = 1 << 23
"""Scores of one prefill tile at most, unless a single row needs more: 32 MiB in float32."""
MAX_TILE_ROWS = 256
"""Rows of one prefill tile at most: keys beyond a tile's last position are not computed, so small tiles save work."""


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """What a layer does with its scores; see backend.Backend.paged_attention."""

    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


def paged_attention(
    query: torch.Tensor, cache: ReferenceCache, batch: AttentionBatch, rule: AttentionRule
) -> torch.Tensor:
    """query [T, Hq, D] -> [T, Hq, Dv] in query's dtype."""
    out = torch.zeros(query.shape[0], query.shape[1], cache.shape.v_head_dim, dtype=query.dtype, device=query.device)
    decodes = batch.num_decodes
    lens = batch.seq_lens.tolist()
    for first, last in _groups(lens[:decodes], cache):
        out[first:last] = _decode_group(query[first:last], cache, batch, rule, first, max(lens[first:last]))
    starts = batch.query_starts.tolist()
    for seq in range(decodes, len(lens)):
        if starts[seq + 1] > starts[seq] and lens[seq] > 0:
            rows = slice(starts[seq], starts[seq + 1])
            _prefill(out[rows], query[rows], cache, batch.block_tables[seq], rule, lens[seq])
    return out


def _groups(lens: list[int], cache: ReferenceCache) -> Iterator[tuple[int, int]]:
    """Half-open ranges of neighbours whose padded keys fit in MAX_GATHERED_ELEMENTS together."""
    per_token = cache.shape.num_kv_heads * max(cache.shape.head_dim, cache.shape.v_head_dim)
    first, longest = 0, 1
    for index, length in enumerate(lens):
        padded = max(longest, length)
        if index > first and (index + 1 - first) * padded * per_token > MAX_GATHERED_ELEMENTS:
            yield first, index
            first, padded = index, max(1, length)
        longest = padded
    if lens:
        yield first, len(lens)


def _decode_group(
    query: torch.Tensor, cache: ReferenceCache, batch: AttentionBatch, rule: AttentionRule, first: int, longest: int
) -> torch.Tensor:
    """One row each of S sequences, the group's first being sequence `first`: query [S, Hq, D] -> [S, Hq, Dv]."""
    if longest == 0:
        return query.new_zeros(query.shape[0], query.shape[1], cache.shape.v_head_dim)
    num_seqs = query.shape[0]
    lens = batch.seq_lens[first : first + num_seqs].unsqueeze(1)
    # Entries past a sequence's end may hold anything: read the null block there.
    num_blocks = -(-longest // cache.block_size)
    tables = batch.block_tables[first : first + num_seqs, :num_blocks]
    block_starts = torch.arange(num_blocks, device=query.device) * cache.block_size
    keys, values = cache.gather(torch.where(block_starts < lens, tables, 0), _work_dtype(query))
    positions = torch.arange(keys.shape[2], device=query.device)
    visible = positions < lens
    if rule.sliding_window is not None:
        visible &= positions >= lens - rule.sliding_window
    # A slot that nobody wrote may hold NaN, and 0 * NaN is NaN.
    values = values.masked_fill((positions >= lens)[None, :, :, None], 0.0)
    # [S, Hkv, G, D] -> [Hkv, S, G, D]: the group's query heads become rows of one matrix.
    grouped = query.reshape(num_seqs, cache.shape.num_kv_heads, -1, query.shape[2]).transpose(0, 1)
    form = (grouped.shape[0], num_seqs, grouped.shape[2], keys.shape[2])
    out = _attend(grouped.to(keys.dtype), keys, values, visible[None, :, None, :], rule, form, heads_dim=2)
    return out.transpose(0, 1).reshape(num_seqs, query.shape[1], -1).to(query.dtype)


def _prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    cache: ReferenceCache,
    table: torch.Tensor,
    rule: AttentionRule,
    seq_len: int,
) -> None:
    """The last R rows of one sequence, query [R, Hq, D] -> out [R, Hq, Dv].

    0 ............. start ..................... seq_len        positions
                    |--tile--|--tile--|--tile--|               rows
    |---- keys of a tile ----|                                 [first key in the first row's window, last row]
    """
    num_rows, num_heads, head_dim = query.shape
    kv_heads = cache.shape.num_kv_heads
    start = seq_len - num_rows
    tile_rows = max(1, min(MAX_TILE_ROWS, MAX_SCORE_ELEMENTS // (num_heads * seq_len)))
    for row in range(0, num_rows, tile_rows):
        rows = min(tile_rows, num_rows - row)
        end = start + row + rows
        window_start = 0 if rule.sliding_window is None else max(0, start + row - rule.sliding_window + 1)
        first_block = window_start // cache.block_size
        last_block = -(-end // cache.block_size)
        keys, values = cache.gather(table[None, first_block:last_block], _work_dtype(query))
        base = first_block * cache.block_size
        keys, values = keys[:, 0, : end - base], values[:, 0, : end - base]
        key_positions = torch.arange(base, end, device=query.device)
        row_positions = torch.arange(start + row, end, device=query.device).unsqueeze(1)
        visible = key_positions <= row_positions
        if rule.sliding_window is not None:
            visible &= row_positions - key_positions < rule.sliding_window
        # [R, Hkv, G, D] -> [Hkv, 1, G * R, D]: one matrix per kv head, so that keys are never copied per query head.
        tile = query[row : row + rows].reshape(rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        form = (kv_heads, num_heads // kv_heads, rows, end - base)
        flat = tile.reshape(kv_heads, 1, -1, head_dim).to(keys.dtype)
        result = _attend(flat, keys.unsqueeze(1), values.unsqueeze(1), visible, rule, form, heads_dim=1)
        result = result.view(kv_heads, num_heads // kv_heads, rows, -1).permute(2, 0, 1, 3)
        out[row : row + rows] = result.reshape(rows, num_heads, -1).to(out.dtype)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    rule: AttentionRule,
    form: tuple[int, int, int, int],
    *,
    heads_dim: int,
) -> torch.Tensor:
    """softmax(cap(q k^T * scale) | sink) v: query [Hkv, A, B, D], keys [Hkv, A, L, D] -> [Hkv, A, B, Dv].

    The scores are masked as a view of shape `form`, to which visible broadcasts; its dimension heads_dim runs over the
    query heads of one kv head.
    """
    scores = torch.matmul(query * rule.scale, keys.transpose(2, 3))
    flat_form = scores.shape
    scores = scores.view(form)
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if rule.sinks is None:
        return torch.matmul(scores.softmax(dim=-1).view(flat_form), values)
    sink_form = [form[0], 1, 1, 1]
    sink_form[heads_dim] = form[heads_dim]
    sinks = rule.sinks.to(scores.dtype).view(sink_form).expand(*form[:3], 1)
    weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    return torch.matmul(weights.reshape(flat_form), values)


def _work_dtype(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32
