"""A decode step's inputs in memory that never moves: a captured graph finds each step's numbers in the same place."""

from dataclasses import dataclass, replace

import torch

from pagefleet_kernels.batch import AttentionBatch
from pagefleet_server.runner.flat_batch import FlatBatch
from pagefleet_server.runner.graph_shapes import GraphShape

_ALIGNMENT = 4
"""Rows of an area are padded to it: every area then starts at a multiple of 16 bytes, as wide loads want."""
PADDING_SLOT = -1
"""Rows of padding store nothing; with a sequence length of 0 they read nothing."""


def moved(batch: FlatBatch, device: torch.device) -> FlatBatch:
    """The batch on another device; itself when it is there."""
    if batch.token_ids.device == device:
        return batch
    attention = batch.attention
    return replace(
        batch,
        token_ids=batch.token_ids.to(device),
        positions=batch.positions.to(device),
        logit_rows=batch.logit_rows.to(device),
        draws_from=None if batch.draws_from is None else batch.draws_from.to(device),
        attention=replace(
            attention,
            query_starts=attention.query_starts.to(device),
            seq_lens=attention.seq_lens.to(device),
            block_tables=attention.block_tables.to(device),
            slot_mapping=attention.slot_mapping.to(device),
        ),
    )


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a graph of one shape reads: views into the buffers, R = shape.num_rows."""

    token_ids: torch.Tensor
    """int64 [R]."""
    positions: torch.Tensor
    """int64 [R]."""
    attention: AttentionBatch
    logit_rows: torch.Tensor
    """int64 [R]: 0 .. R - 1."""


@dataclass(frozen=True, slots=True)
class _Areas:
    """The same views on host or device."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    """int32 [R, blocks of the longest sequence]."""


class StepBuffers:
    """One piece of memory on the host and one of the same layout on the device: a step is one copy.

        token ids | positions | slots | lengths | block tables      (the first three 64 bits wide, the others 32)

    Every shape has a layout of its own from the start of the memory on, as short as it can be.
    """

    def __init__(self, *, max_rows: int, max_seq_len: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        words = _num_words(GraphShape(max_rows, max_seq_len), block_size)
        pinned = device.type == "cuda"
        self._host = torch.zeros(words, dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        self._counting = torch.arange(max_rows + 1, dtype=torch.int64, device=device)
        self._starts = self._counting.to(torch.int32)

    def inputs(self, shape: GraphShape) -> DecodeInputs:
        """The memory that a graph of this shape reads."""
        areas = _areas(self._device, shape, self._block_size)
        attention = AttentionBatch(
            query_starts=self._starts[: shape.num_rows + 1],
            seq_lens=areas.seq_lens,
            block_tables=areas.block_tables,
            slot_mapping=areas.slots,
            num_decodes=shape.num_rows,
            max_query_len=1,
            max_seq_len=shape.max_seq_len,
        )
        return DecodeInputs(areas.token_ids, areas.positions, attention, self._counting[: shape.num_rows])

    def fill(self, shape: GraphShape, batch: FlatBatch) -> None:
        """Put a step of single rows, which lies on the host and fits into the shape, into its place; the rest becomes
        padding. The copy is enqueued: the host's memory is free again when the device has caught up, which it has once
        anything of the step was read back."""
        areas = _areas(self._host, shape, self._block_size)
        rows, attention = batch.token_ids.shape[0], batch.attention
        for area, values, padding in (
            (areas.token_ids, batch.token_ids, 0),
            (areas.positions, batch.positions, 0),
            (areas.slots, attention.slot_mapping, PADDING_SLOT),
            (areas.seq_lens, attention.seq_lens, 0),
        ):
            area[:rows] = values
            area[rows:] = padding
        # Entries behind a sequence's end are never read: what an earlier step left there may stay.
        columns = min(areas.block_tables.shape[1], attention.block_tables.shape[1])
        areas.block_tables[:rows, :columns] = attention.block_tables[:, :columns]
        words = _num_words(shape, self._block_size)
        self._device[:words].copy_(self._host[:words], non_blocking=True)


def _padded(rows: int) -> int:
    return -(-rows // _ALIGNMENT) * _ALIGNMENT


def _columns(shape: GraphShape, block_size: int) -> int:
    return -(-shape.max_seq_len // block_size)


def _num_words(shape: GraphShape, block_size: int) -> int:
    """Of 32 bits."""
    return 7 * _padded(shape.num_rows) + shape.num_rows * _columns(shape, block_size)


def _areas(memory: torch.Tensor, shape: GraphShape, block_size: int) -> _Areas:
    rows, padded, columns = shape.num_rows, _padded(shape.num_rows), _columns(shape, block_size)
    wide = memory[: 6 * padded].view(torch.int64)
    tables = memory[7 * padded : 7 * padded + rows * columns]
    return _Areas(
        token_ids=wide[:rows],
        positions=wide[padded : padded + rows],
        slots=wide[2 * padded : 2 * padded + rows],
        seq_lens=memory[6 * padded : 6 * padded + rows],
        block_tables=tables.view(rows, columns),
    )
