"""Temperature, top_k, top_p and min_p: which tokens are left, and how likely each is."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.runner.rows import Ids, Row

BUCKET_SHIFT = 19
"""Bits of a float32 weight that its bucket ignores: 16 buckets per factor of two."""
BLOCK = 256
"""Weights that are summed together in the first pass of a draw."""
TINY = np.finfo(np.float32).tiny
"""Least temperature that a row is divided by."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Tokens that may be drawn."""

    ids: Ids | None
    """Rising; None: every token of the vocabulary."""
    weights: npt.NDArray[np.float32]
    """By index of ids: probability relative to the likeliest, whose weight is 1."""

    def draw(self, number: float) -> int:
        """The token where the running sum of probabilities, in id order, passes `number` in [0, 1).

        Sums run in float64: over blocks first, then inside the block that holds the target.
        """
        starts = np.arange(0, self.weights.shape[0], BLOCK)
        blocks = np.cumsum(np.add.reduceat(self.weights, starts, dtype=np.float64))
        # Below the whole, whatever the product rounds to: some weight is beyond it.
        target = min(number * blocks[-1], np.nextafter(blocks[-1], 0.0))
        block = int(np.searchsorted(blocks, target, side="right"))
        before = blocks[block - 1] if block else 0.0
        inside = self.weights[block * BLOCK : (block + 1) * BLOCK]
        sums = before + np.cumsum(inside, dtype=np.float64)
        index = int(np.searchsorted(sums, target, side="right"))
        if index >= inside.shape[0]:
            # Rounding: the target lies on the block's end. The last token that can be drawn there.
            index = int(np.flatnonzero(inside)[-1])
        index += block * BLOCK
        return index if self.ids is None else int(self.ids[index])


def distribution(logits: Row, params: SamplingParams) -> Distribution:
    """What temperature > 0, top_k, top_p and min_p (in this order) leave of logits [V], finite at their maximum.

    Ties at top_k's threshold are all kept; top_p keeps the likeliest tokens, lower ids first among equals, until their
    share reaches top_p, and at least one. The maximum is taken off before the division, which then overflows to minus
    infinity alone: any temperature above 0 leaves the likeliest tokens, those that float32 takes for 0 too.
    """
    ids: Ids | None = None
    if 0 < params.top_k < logits.shape[0]:
        threshold = torch.from_numpy(logits).topk(params.top_k).values[-1].item()
        ids = np.flatnonzero(logits >= threshold)
        logits = logits[ids]
    with np.errstate(over="ignore"):
        scores = (logits - logits.max()) / max(np.float32(params.temperature), TINY)
    weights: npt.NDArray[np.float32] = np.exp(scores)
    if params.top_p < 1.0:
        kept = _nucleus(weights, params.top_p)
        weights = weights[kept]
        ids = kept if ids is None else ids[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= np.float32(params.min_p))
        weights = weights[kept]
        ids = kept if ids is None else ids[kept]
    return Distribution(ids=ids, weights=weights)


def _nucleus(weights: npt.NDArray[np.float32], top_p: float) -> Ids:
    """Indices, rising, of the smallest set of likeliest entries whose share reaches top_p.

    Weights in [0, 1] fall into buckets by their leading bits, which are ordered as the numbers are. Whole buckets are
    taken from the top while their sum stays short; only the one that reaches the share is sorted.
    """
    buckets = weights.view(np.int32) >> BUCKET_SHIFT
    sums = np.bincount(buckets, weights=weights)
    from_top = np.cumsum(sums[::-1])
    wanted = top_p * from_top[-1]
    last = int(np.searchsorted(from_top, wanted))
    bucket = sums.shape[0] - 1 - last
    edge = np.flatnonzero(buckets == bucket)
    edge = edge[np.argsort(-weights[edge], kind="stable")]
    above = from_top[last - 1] if last else 0.0
    # A token stays when the sum of those before it is below what is wanted.
    reached = int(np.searchsorted(above + np.cumsum(weights[edge], dtype=np.float64), wanted))
    kept = np.concatenate([np.flatnonzero(buckets > bucket), edge[: reached + 1]])
    kept.sort()
    return kept
