"""A scheduled step as flat arrays, filled with numpy in one go and handed to torch without a copy."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from pagefleet_kernels.batch import AttentionBatch
from pagefleet_server.core.step import ScheduledRequest, SchedulerOutput


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """One step's inputs on the device, and who gets which row of logits."""

    token_ids: torch.Tensor
    """int64 [T]."""
    positions: torch.Tensor
    """int64 [T]."""
    attention: AttentionBatch
    logit_rows: torch.Tensor
    """int64 [N]: rows whose logits are wanted, each once."""
    sampled: tuple[ScheduledRequest, ...]
    """The requests that draw a token; the forks of a request stand behind it, as requests of their own. Each takes
    1 + num_drafts draws."""
    draws_from: torch.Tensor | None
    """int64 [draws]: index into the wanted logits of each draw; None when it is 0, 1, 2 ... to the last."""
    scores: tuple["ScoredPrompt", ...]
    """Requests whose prompt tokens are scored."""


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """One request's prompt_targets: the i-th is scored by row first_row + i of the wanted logits."""

    request: ScheduledRequest
    first_row: int


def flatten(step: SchedulerOutput, *, block_size: int, device: torch.device) -> FlatBatch:
    """Lay out a step. Row r of a request sits at position start + r; its slot follows from its block table."""
    scheduled = step.scheduled
    num_seqs = len(scheduled)
    query_lens = np.fromiter((len(request.token_ids) for request in scheduled), dtype=np.int64, count=num_seqs)
    starts = np.fromiter((request.start for request in scheduled), dtype=np.int64, count=num_seqs)
    query_starts = np.zeros(num_seqs + 1, dtype=np.int64)
    np.cumsum(query_lens, out=query_starts[1:])
    num_tokens = int(query_starts[-1])
    token_ids = np.fromiter(
        (token for request in scheduled for token in request.token_ids), dtype=np.int64, count=num_tokens
    )
    table_lens = [len(request.block_ids) for request in scheduled]
    block_tables = np.zeros((num_seqs, max(table_lens, default=1)), dtype=np.int32)
    for index, request in enumerate(scheduled):
        block_tables[index, : table_lens[index]] = request.block_ids
    owners = np.repeat(np.arange(num_seqs), query_lens)
    positions = np.arange(num_tokens) - np.repeat(query_starts[:-1], query_lens) + np.repeat(starts, query_lens)
    slots = block_tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
    seq_lens = starts + query_lens
    wanted = _wanted_logits(scheduled, query_starts)

    def on_device(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return FlatBatch(
        token_ids=on_device(token_ids),
        positions=on_device(positions),
        attention=AttentionBatch(
            query_starts=on_device(query_starts.astype(np.int32)),
            seq_lens=on_device(seq_lens.astype(np.int32)),
            block_tables=on_device(block_tables),
            slot_mapping=on_device(slots),
            num_decodes=step.num_decodes,
            max_query_len=int(query_lens.max(initial=0)),
            max_seq_len=int(seq_lens.max(initial=0)),
        ),
        logit_rows=on_device(np.array(wanted.rows, dtype=np.int64)),
        sampled=tuple(wanted.sampled),
        draws_from=None if wanted.is_plain else on_device(np.array(wanted.draws_from, dtype=np.int64)),
        scores=tuple(wanted.scores),
    )


@dataclass(slots=True)
class _WantedLogits:
    rows: list[int]
    sampled: list[ScheduledRequest]
    draws_from: list[int]
    scores: list[ScoredPrompt]

    @property
    def is_plain(self) -> bool:
        """One draw for each row, in order."""
        return len(self.rows) == len(self.draws_from) and not self.scores


def _wanted_logits(
    scheduled: tuple[ScheduledRequest, ...], query_starts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
) -> _WantedLogits:
    """Rows whose logits are wanted and by whom: prompt tokens to score, then the request's draw and those of its forks,
    which draw as requests of their own from the same row; or the request's draw and those behind its guesses."""
    wanted = _WantedLogits([], [], [], [])
    for index, request in enumerate(scheduled):
        if request.prompt_targets:
            count, first = len(request.prompt_targets), int(query_starts[index]) + request.scored_from
            wanted.scores.append(ScoredPrompt(request, len(wanted.rows)))
            wanted.rows.extend(range(first, first + count))
        if request.sample:
            forks = (
                replace(request, request_id=fork.request_id, sampling=fork.sampling, history=fork.history, forks=())
                for fork in request.forks
            )
            first, end = len(wanted.rows), int(query_starts[index + 1])
            wanted.sampled.append(request)
            wanted.sampled.extend(forks)
            wanted.draws_from.extend(range(first, first + 1 + request.num_drafts))
            wanted.draws_from.extend([first] * len(request.forks))
            wanted.rows.extend(range(end - 1 - request.num_drafts, end))
    return wanted
