"""Does a library's attention say what ours says? Asked once, before it serves.

The adapters of attention libraries rest on what those libraries document; a version that means something else by a
window or an empty sequence would give wrong tokens, not an error.
"""

from typing import Any

import torch

from pagefleet_kernels.backend import Backend
from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.errors import BackendUnavailable
from pagefleet_kernels.reference import make_backend as make_reference

TOLERANCE = 0.01
"""|out - want| / |want|; float16 is at a few 1e-4."""
SHAPE = KVShape(num_kv_heads=2, head_dim=64, v_head_dim=64)
NUM_HEADS = 6
LENGTHS = (300, 17, 0, 270, 40)
WINDOW = 21
ROWS = (1, 1, 1, 9, 40)
"""Decodes, one of them padding; a chunk behind a prefix; a whole prompt."""


def probe(backend: Backend, device: torch.device, *, block_size: int, softcap: float | None) -> None:
    """Hold one ragged batch against plain torch: plain, with a window, and capped (softcap None: the backend caps not).

    Raises BackendUnavailable when the results differ, or when the backend fails.
    """
    rules: dict[str, dict[str, Any]] = {"full": {}, "windowed": {"sliding_window": WINDOW}}
    if softcap is not None:
        rules["capped"] = {"softcap": softcap}
    generator = torch.Generator().manual_seed(0)
    tables, num_blocks = _tables(block_size, generator)
    slots = torch.cat(
        [
            (row.long()[:, None] * block_size + torch.arange(block_size)).flatten()[:length]
            for row, length in zip(tables, LENGTHS, strict=True)
        ]
    )
    key, value = (torch.randn(len(slots), 2, 64, generator=generator).to(device, torch.float16) for _ in range(2))
    query = torch.randn(sum(ROWS), NUM_HEADS, 64, generator=generator).to(device, torch.float16)
    starts = torch.tensor([0, *ROWS]).cumsum(0).to(device, torch.int32)
    batch = AttentionBatch(
        query_starts=starts,
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        slot_mapping=torch.full((sum(ROWS),), -1, dtype=torch.int64, device=device),
        num_decodes=3,
        max_query_len=max(ROWS),
        max_seq_len=max(LENGTHS),
    )
    results = []
    try:
        for each in (backend, make_reference()):
            cache = each.allocate(
                SHAPE, num_blocks=num_blocks, block_size=block_size, dtype=torch.float16, device=device
            )
            each.write_kv(cache, key, value, slots.to(device))
            results.append([each.paged_attention(query, cache, batch, scale=0.2, **rule) for rule in rules.values()])
    except Exception as error:  # the boundary: a foreign library may raise anything
        raise BackendUnavailable(f"its self-check failed: {type(error).__name__}: {error}"[:300]) from error
    for name, out, want in zip(rules, *results, strict=True):
        wrong = float((out.double() - want.double()).norm() / want.double().norm())
        if not wrong <= TOLERANCE:
            raise BackendUnavailable(
                f"its self-check failed: {name} attention differs from plain torch by {wrong:.3g} (limit {TOLERANCE})"
            )


def _tables(block_size: int, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """Shuffled block tables for LENGTHS, and the blocks that they need, the null block included."""
    needed = [-(-length // block_size) for length in LENGTHS]
    order = (torch.randperm(sum(needed), generator=generator) + 1).to(torch.int32)
    tables = torch.zeros(len(needed), max(needed), dtype=torch.int32)
    first = 0
    for row, count in zip(tables, needed, strict=True):
        row[:count] = order[first : first + count]
        first += count
    return tables, sum(needed) + 1
