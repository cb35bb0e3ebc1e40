"""Batches and numbers that nobody should send: for tests that calls with them stay inside their own memory."""

import torch
from hypothesis import strategies as st

from pagefleet_kernels.batch import AttentionBatch, KVShape

SHAPE = KVShape(num_kv_heads=2, head_dim=8, v_head_dim=6)
NUM_BLOCKS, BLOCK_SIZE = 5, 16
EXTREMES = (-(2**31), -17, -1, 0, 1, 2, 4, 5, 6, 15, 16, 17, 31, 32, 33, 79, 80, 81, 2**31 - 1)
"""Around every bound of a cache of the above, and the ends of int32."""
NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.3, 1e-38, 1e30, float("inf"), float("-inf"), float("nan")])
"""Logits and sampling settings."""


@st.composite
def batches(draw: st.DrawFn) -> AttentionBatch:
    """Mostly near a batch that is right: wild ones alone would all end at the first check."""
    num_seqs = draw(st.integers(0, 3))
    counts = draw(st.lists(st.integers(0, 4), min_size=num_seqs, max_size=num_seqs))
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    rows = starts[-1]
    lengths = [count + draw(st.integers(0, 40)) for count in counts]
    width = draw(st.integers(0, 4))
    tables = [draw(st.lists(st.integers(1, NUM_BLOCKS - 1), min_size=width, max_size=width)) for _ in range(num_seqs)]
    slots = [-1] * rows
    for _ in range(draw(st.integers(0, 2))):
        wild = draw(st.sampled_from(EXTREMES))
        target = draw(st.sampled_from([starts, lengths, slots, *tables]))
        if target:
            target[draw(st.integers(0, len(target) - 1))] = wild
    return AttentionBatch(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32).view(num_seqs, width),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        num_decodes=draw(st.integers(-1, 3)),
        max_query_len=draw(st.sampled_from([0, 1, 4, 2**31 - 1])),
        max_seq_len=draw(st.sampled_from([0, 1, 64, 2**31 - 1])),
    )
