"""What a sampler may draw, in float64: the running sum over what top-k, top-p and min-p leave, in this order."""

import torch

SLACK = 3e-6
"""Weights are computed in float32: a number so near to a border between two tokens may fall to either, and so may a
token that is so near to the border of top_p or min_p."""


def weights(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """float64 [V]: 0 for what is out."""
    scores = logits.double()
    found = torch.exp((scores - scores.max()) / temperature)
    if 0 < top_k < scores.shape[0]:
        found = torch.where(scores >= scores.topk(top_k).values[-1], found, 0.0)
    if top_p < 1.0:
        order = found.sort(descending=True, stable=True).indices
        before = found[order].cumsum(0) - found[order]
        inside = order[(before < top_p * found.sum()) & (found[order] > 0)]
        nucleus = torch.zeros_like(found)
        nucleus[inside] = found[inside]
        found = nucleus
    return torch.where(found >= min_p, found, 0.0)


def may_draw(
    token: int, logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, number: float
) -> bool:
    """The running sum passes `number` of the whole at this token, within SLACK."""
    for moved_top_p in {top_p, min(1.0, top_p * (1 + SLACK)), top_p * (1 - SLACK)}:
        for moved_min_p in {min_p, min_p * (1 - SLACK), min_p * (1 + SLACK)}:
            found = weights(logits, temperature, top_k, moved_top_p, moved_min_p)
            end = float(found.cumsum(0)[token] / found.sum())
            start = end - float(found[token] / found.sum())
            if float(found[token]) > 0 and start - SLACK <= number <= end + SLACK:
                return True
    return False
