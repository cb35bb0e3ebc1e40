"""Log-probabilities of a drawn token and of the likeliest ones, as the model gave them."""

import numpy as np
import torch

from pagefleet_server.core.step import TokenLogprobs
from pagefleet_server.runner.flat_batch import ScoredPrompt
from pagefleet_server.runner.rows import Row


def token_logprobs(logits: Row, token_id: int, num_top: int) -> TokenLogprobs:
    """logits [V] before any rule; num_top >= 0, cut to the vocabulary. Sums run in float64."""
    top = logits.max()
    log_total = float(top) + float(np.log(np.exp(logits - top).sum(dtype=np.float64)))
    chosen = logits[token_id]
    return TokenLogprobs(
        logprob=float(chosen) - log_total,
        rank=int((logits > chosen).sum()) + 1,
        top=tuple((index, float(logits[index]) - log_total) for index in _likeliest(logits, num_top)),
    )


def score_prompt(logits: torch.Tensor, scored: ScoredPrompt) -> list[TokenLogprobs]:
    """Of each of the request's prompt_targets, from the step's wanted logits [N, V]."""
    targets, num_top = scored.request.prompt_targets, scored.request.sampling.prompt_logprobs or 0
    rows = logits[scored.first_row : scored.first_row + len(targets)].float().cpu().numpy()
    return [token_logprobs(row, target, num_top) for row, target in zip(rows, targets, strict=True)]


def _likeliest(logits: Row, count: int) -> list[int]:
    """Ids of the largest entries, falling, lower ids first among equals."""
    count = min(count, logits.shape[0])
    if count == 0:
        return []
    threshold = torch.from_numpy(logits).topk(count).values[-1].item()
    candidates = np.flatnonzero(logits >= threshold)
    order: list[int] = candidates[np.argsort(-logits[candidates], kind="stable")][:count].tolist()
    return order
