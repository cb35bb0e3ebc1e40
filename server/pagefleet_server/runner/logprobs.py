"""Log-probabilities of a drawn token and of the likeliest ones, as the model gave them."""

import numpy as np
import torch

from pagefleet_server.core.step import TokenLogprobs
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


def _likeliest(logits: Row, count: int) -> list[int]:
    """Ids of the largest entries, falling, lower ids first among equals."""
    count = min(count, logits.shape[0])
    if count == 0:
        return []
    threshold = torch.from_numpy(logits).topk(count).values[-1].item()
    candidates = np.flatnonzero(logits >= threshold)
    order: list[int] = candidates[np.argsort(-logits[candidates], kind="stable")][:count].tolist()
    return order
