"""Paged attention in float64 by plain loops, and builders of ragged, fragmented batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagefleet_kernels.batch import AttentionBatch, KVShape

SMALL = KVShape(num_kv_heads=2, head_dim=16, v_head_dim=16)


@dataclass(frozen=True, slots=True)
class Case:
    """One step: sequences as (rows of this step, length after it), decode sequences first."""

    sequences: tuple[tuple[int, int], ...]
    shape: KVShape = SMALL
    num_q_heads: int = 6
    block_size: int = 16
    scale: float = 0.25
    sliding_window: int | None = None
    softcap: float | None = None
    with_sinks: bool = False
    shared_prefix_blocks: int = 0
    """Blocks that every sequence long enough shares with the first one."""

    @property
    def num_rows(self) -> int:
        return sum(rows for rows, _ in self.sequences)

    @property
    def num_decodes(self) -> int:
        count = 0
        for rows, _ in self.sequences:
            if rows != 1:
                break
            count += 1
        return count


@dataclass(frozen=True, slots=True)
class World:
    """A case with its data: what was written at every position, where, and the step's queries."""

    case: Case
    batch: AttentionBatch
    num_blocks: int
    history_slots: torch.Tensor
    """int64 [N]: slots of everything written up to and including this step."""
    history_keys: torch.Tensor
    history_values: torch.Tensor
    query: torch.Tensor
    sinks: torch.Tensor | None
    want: torch.Tensor
    """float64 [T, Hq, Dv]."""


def build(case: Case, *, seed: int = 0, dtype: torch.dtype = torch.float32, spare_blocks: int = 5) -> World:
    """Random data; block ids shuffled over the pool; table entries past the end hold ids out of range."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    needed = [-(-length // case.block_size) for _, length in case.sequences]
    width = max([*needed, 1]) + 2
    num_blocks = 1 + sum(needed) + spare_blocks
    free = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
    tables = torch.full((len(case.sequences), width), 2**30, dtype=torch.int32)
    for index, count in enumerate(needed):
        shared = min(case.shared_prefix_blocks, count, needed[0]) if index else 0
        ids = tables[0, :shared].tolist() + [free.pop() for _ in range(count - shared)]
        tables[index, :count] = torch.tensor(ids, dtype=torch.int32)

    shape = case.shape
    keys_at: dict[int, torch.Tensor] = {}
    values_at: dict[int, torch.Tensor] = {}
    slots: list[list[int]] = []
    for index, (_, length) in enumerate(case.sequences):
        own = [
            int(tables[index, position // case.block_size]) * case.block_size + position % case.block_size
            for position in range(length)
        ]
        slots.append(own)
        for slot in own:
            if slot not in keys_at:
                keys_at[slot] = normal(shape.num_kv_heads, shape.head_dim)
                values_at[slot] = normal(shape.num_kv_heads, shape.v_head_dim)

    query = normal(case.num_rows, case.num_q_heads, shape.head_dim)
    sinks = normal(case.num_q_heads) if case.with_sinks else None
    starts = [0]
    mapping: list[int] = []
    want = torch.zeros(case.num_rows, case.num_q_heads, shape.v_head_dim, dtype=torch.float64)
    for index, (rows, length) in enumerate(case.sequences):
        mapping += slots[index][length - rows :] if length else [-1] * rows
        for row in range(rows if length else 0):
            position = length - rows + row
            seen = slots[index][: position + 1]
            if case.sliding_window is not None:
                seen = seen[-case.sliding_window :]
            want[starts[-1] + row] = _row(
                query[starts[-1] + row].double(),
                torch.stack([keys_at[slot] for slot in seen]).double(),
                torch.stack([values_at[slot] for slot in seen]).double(),
                case,
                sinks,
            )
        starts.append(starts[-1] + rows)
    written = sorted(keys_at)
    batch = AttentionBatch(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([length for _, length in case.sequences], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.tensor(mapping, dtype=torch.int64),
        num_decodes=case.num_decodes,
        max_query_len=max([rows for rows, _ in case.sequences], default=0),
        max_seq_len=max([length for _, length in case.sequences], default=0),
    )
    empty_keys = torch.zeros(0, shape.num_kv_heads, shape.head_dim, dtype=dtype)
    empty_values = torch.zeros(0, shape.num_kv_heads, shape.v_head_dim, dtype=dtype)
    return World(
        case=case,
        batch=batch,
        num_blocks=num_blocks,
        history_slots=torch.tensor(written, dtype=torch.int64),
        history_keys=torch.stack([keys_at[slot] for slot in written]) if written else empty_keys,
        history_values=torch.stack([values_at[slot] for slot in written]) if written else empty_values,
        query=query,
        sinks=sinks,
        want=want,
    )


def _row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, case: Case, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One query row [Hq, D] over keys [L, Hkv, D], head by head."""
    group = case.num_q_heads // case.shape.num_kv_heads
    heads = []
    for head in range(case.num_q_heads):
        scores = (keys[:, head // group] @ query[head]) * case.scale
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        top = max(float(scores.max()), float(sinks[head]) if sinks is not None else -math.inf)
        weights = torch.exp(scores - top)
        total = weights.sum() + (math.exp(float(sinks[head]) - top) if sinks is not None else 0.0)
        heads.append((weights / total) @ values[:, head // group])
    return torch.stack(heads)


B = 16
CASES: dict[str, Case] = {
    "one decode row of a fresh sequence": Case(((1, 1),)),
    "decode around block boundaries": Case(tuple((1, n) for n in (B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1))),
    "ragged decode, one long": Case(((1, 3), (1, 200), (1, 17))),
    "whole prompts around block boundaries": Case(tuple((n, n) for n in (B - 1, B, B + 1, 2, 40))),
    "prompt chunks in the middle": Case(((5, 21), (16, 32), (17, 33), (3, 90))),
    "decodes then chunks": Case(((1, 9), (1, 64), (7, 7), (16, 48))),
    "one row chunk after a chunk": Case(((2, 2), (1, 1), (1, 30))),
    "empty sequences between": Case(((1, 5), (0, 0), (4, 12), (0, 7), (3, 3))),
    "padding decode rows": Case(((1, 20), (1, 0), (1, 0))),
    "nothing at all": Case(()),
    "shared prefix blocks": Case(((1, 50), (1, 50), (6, 40)), shared_prefix_blocks=2),
    "long prompt in tiles": Case(((600, 650),), KVShape(1, 8, 8), num_q_heads=2),
    "window of one": Case(((1, 40), (20, 33)), sliding_window=1),
    "window off the block grid": Case(((1, 100), (1, 6), (30, 75), (13, 13)), sliding_window=23),
    "window wider than the sequence": Case(((1, 20), (9, 9)), sliding_window=64),
    "softcap": Case(((1, 30), (11, 25)), softcap=2.0),
    "sinks": Case(((1, 1), (1, 30), (11, 25)), with_sinks=True),
    "window, softcap and sinks": Case(((1, 70), (25, 60)), sliding_window=19, softcap=5.0, with_sinks=True),
    "V narrower than K": Case(((1, 33), (18, 34)), KVShape(2, 24, 16)),
    "V wider than K": Case(((1, 33), (18, 34)), KVShape(3, 8, 20), num_q_heads=3),
    "no GQA": Case(((1, 18), (5, 18)), KVShape(4, 16, 16), num_q_heads=4),
    "one kv head, group of 7": Case(((1, 18), (5, 18)), KVShape(1, 64, 64), num_q_heads=7),
    "SmolLM2 heads": Case(((1, 130), (1, 16), (40, 80)), KVShape(3, 64, 64), num_q_heads=9, scale=0.125),
    "blocks of 8": Case(((1, 17), (9, 24)), block_size=8),
    "blocks of 64": Case(((1, 65), (64, 128), (3, 3)), block_size=64),
    # Every feature, K and V of different odd widths, decodes and chunks, at every block size.
    **{
        f"everything, blocks of {size}": Case(
            ((1, 300), (1, 16), (9, 70), (20, 20)),
            KVShape(2, 24, 40),
            block_size=size,
            sliding_window=41,
            softcap=4.0,
            with_sinks=True,
        )
        for size in (16, 32, 64, 128, 256)
    },
}
"""By name: every shape of work that a backend must get right."""


def names(cases: Sequence[str] | None = None) -> list[str]:
    return sorted(CASES if cases is None else cases)
