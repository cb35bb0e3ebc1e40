"""Log-probabilities of a drawn token and of the likeliest ones, as the model gave them."""

from collections.abc import Sequence

import numpy as np
import torch

from pagefleet_server.core.step import TokenLogprobs
from pagefleet_server.runner.flat_batch import ScoredPrompt
from pagefleet_server.runner.rows import Row

NO_LOGITS = "the model's logits for this request are no numbers"
"""Why a request fails; what they reach follows."""


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


def score_prompts(
    logits: torch.Tensor, prompts: Sequence[ScoredPrompt]
) -> tuple[dict[str, list[TokenLogprobs]], dict[str, str]]:
    """Of each request's prompt_targets, from the step's wanted logits [N, V]; and why a request has none, when its
    logits are NaN or infinite."""
    scores: dict[str, list[TokenLogprobs]] = {}
    failed: dict[str, str] = {}
    for prompt in prompts:
        targets, num_top = prompt.request.prompt_targets, prompt.request.sampling.prompt_logprobs or 0
        rows = logits[prompt.first_row : prompt.first_row + len(targets)].float().cpu().numpy()
        largest = rows.max(axis=1)
        if np.isfinite(largest).all():
            found = zip(rows, targets, strict=True)
            scores[prompt.request.request_id] = [token_logprobs(row, target, num_top) for row, target in found]
        else:
            failed[prompt.request.request_id] = f"{NO_LOGITS}: in its prompt they reach {largest.max()}"
    return scores, failed


def _likeliest(logits: Row, count: int) -> list[int]:
    """Ids of the largest entries, falling, lower ids first among equals."""
    count = min(count, logits.shape[0])
    if count == 0:
        return []
    threshold = torch.from_numpy(logits).topk(count).values[-1].item()
    candidates = np.flatnonzero(logits >= threshold)
    order: list[int] = candidates[np.argsort(-logits[candidates], kind="stable")][:count].tolist()
    return order
