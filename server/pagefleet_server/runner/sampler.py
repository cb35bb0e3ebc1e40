"""From logits to one token per row.

Every row is handled on its own, on the CPU in float32, with sums over its vocabulary alone and in a fixed order, and
its random number depends on (seed, position) only: a request's tokens never depend on its neighbours, its place in the
batch or the number of threads.
"""

from collections.abc import Sequence

import numpy as np
import torch

from pagefleet_server.core.step import ScheduledRequest, StepResult, TokenLogprobs
from pagefleet_server.runner.counter_rng import uniform
from pagefleet_server.runner.distribution import distribution
from pagefleet_server.runner.grammars import Grammars, Mask
from pagefleet_server.runner.logit_rules import apply_rules
from pagefleet_server.runner.logprobs import NO_LOGITS, token_logprobs
from pagefleet_server.runner.rows import Row


def sample(logits: torch.Tensor, requests: Sequence[ScheduledRequest], grammars: Grammars | None = None) -> StepResult:
    """logits [N, V] of any float dtype, one request per row; grammars: needed by requests that have one. A request
    whose logits are NaN or infinite fails alone."""
    rows = logits.float().cpu().numpy()
    sampled: dict[str, int] = {}
    logprobs: dict[str, TokenLogprobs] = {}
    failed: dict[str, str] = {}
    for row, request in zip(rows, requests, strict=True):
        # argmax gives the first of several maxima, the lowest id; and a NaN wherever there is one.
        likeliest = int(row.argmax())
        if not np.isfinite(row[likeliest]):
            failed[request.request_id] = f"{NO_LOGITS}: they reach {row[likeliest]}"
            continue
        allowed = None
        if request.sampling.grammar is not None:
            assert grammars is not None, "a request with a grammar, and nobody to read it"
            allowed = grammars.allowed(request)
        token = _pick(row, request, allowed, likeliest)
        sampled[request.request_id] = token
        if request.sampling.logprobs is not None:
            logprobs[request.request_id] = token_logprobs(row, token, request.sampling.logprobs)
    return StepResult(sampled=sampled, logprobs=logprobs, failed=failed)


def _pick(row: Row, request: ScheduledRequest, allowed: Mask | None, likeliest: int) -> int:
    params = request.sampling
    if params.changes_logits:
        row = apply_rules(row, params, request.history, allowed)
        likeliest = int(row.argmax())
    if params.temperature == 0.0:
        return likeliest
    position = request.start + len(request.token_ids)
    return distribution(row, params).draw(uniform(params.seed, position))
