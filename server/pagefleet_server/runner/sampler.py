"""From logits to one token per row.

Every row is handled on its own, in float32, with reductions over its vocabulary alone, and its random number depends on
(seed, position) only: a request's tokens never depend on its neighbours or its place in the batch.
"""

from collections.abc import Sequence

import torch

from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import ScheduledRequest
from pagefleet_server.runner.counter_rng import uniform

FIRST_CANDIDATES = 1024
"""top_p looks among so many of the likeliest tokens before it sorts the whole vocabulary."""


def sample(logits: torch.Tensor, requests: Sequence[ScheduledRequest]) -> list[int]:
    """logits [N, V] of any float dtype, one request per row -> N token ids."""
    greedy = [row for row, request in enumerate(requests) if request.sampling.temperature == 0.0]
    tokens = [0] * len(requests)
    if greedy:
        rows = logits if len(greedy) == len(requests) else logits[greedy]
        # argmax gives the first of several maxima: the lowest id.
        for row, token in zip(greedy, rows.argmax(dim=-1).tolist(), strict=True):
            tokens[row] = token
    for row, request in enumerate(requests):
        if request.sampling.temperature != 0.0:
            position = request.start + len(request.token_ids)
            tokens[row] = draw(logits[row], request.sampling, uniform(request.sampling.seed, position))
    return tokens


def draw(logits: torch.Tensor, params: SamplingParams, number: float) -> int:
    """The token where the running sum of probabilities, in id order, passes `number` in [0, 1). logits [V]."""
    ids, probabilities = distribution(logits, params)
    sums = probabilities.cumsum(0)
    index = int(torch.searchsorted(sums, number * float(sums[-1]), right=True))
    index = min(index, sums.shape[0] - 1)
    return index if ids is None else int(ids[index])


def distribution(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor | None, torch.Tensor]:
    """What temperature > 0, top_k and top_p (in this order) leave of logits [V].

    Returns the kept ids in rising order (None: all) and their weights, float64, not normalised (the largest is 1).
    Ties at top_k's threshold are all kept; top_p keeps the likeliest tokens, lower ids first among equals, until their
    share reaches top_p, and at least one.
    """
    scores = logits.float() / params.temperature
    kept: torch.Tensor | None = None
    if 0 < params.top_k < scores.shape[0]:
        threshold = scores.topk(params.top_k).values[-1]
        kept = (scores >= threshold).nonzero().squeeze(1)
        scores = scores[kept]
    if params.top_p < 1.0:
        inside = _nucleus(scores, params.top_p)
        scores = scores[inside]
        kept = inside if kept is None else kept[inside]
    return kept, (scores - scores.max()).double().exp()


def _nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Indices, rising, of the smallest set of likeliest entries of scores [V] whose share reaches top_p."""
    weights = (scores - scores.max()).double().exp()
    total = float(weights.sum())
    size = scores.shape[0]
    for count in (min(FIRST_CANDIDATES, size), size):
        candidates = _likeliest(scores, count)
        share = weights[candidates].cumsum(0) / total
        # A token stays when the share of those before it is below top_p.
        reached = int(torch.searchsorted(share, top_p))
        if reached < candidates.shape[0]:
            return candidates[: reached + 1].sort().values
    return torch.arange(size, device=scores.device)


def _likeliest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of at least `count` largest scores, falling; equal scores by rising index; ties of the last all in."""
    if count < scores.shape[0]:
        threshold = scores.topk(count).values[-1]
        indices = (scores >= threshold).nonzero().squeeze(1)
        return indices[scores[indices].sort(descending=True, stable=True).indices]
    return scores.sort(descending=True, stable=True).indices
