"""From logits to one token per row.

Every row is handled on its own, on the CPU in float32, with sums over its vocabulary alone and in a fixed order, and
its random number depends on (seed, position) only: a request's tokens never depend on its neighbours, its place in the
batch or the number of threads.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pagefleet_server.core.step import DrawnToken, ScheduledRequest, StepResult, TokenLogprobs
from pagefleet_server.runner.counter_rng import uniform
from pagefleet_server.runner.distribution import distribution
from pagefleet_server.runner.grammars import Grammars, GrammarTooComplexError, Mask
from pagefleet_server.runner.logit_rules import apply_rules
from pagefleet_server.runner.logprobs import NO_LOGITS, token_logprobs
from pagefleet_server.runner.rows import Row


def sample(logits: torch.Tensor, requests: Sequence[ScheduledRequest], grammars: Grammars | None = None) -> StepResult:
    """logits [N, V] of any float dtype; 1 + num_drafts rows for each request, in order; grammars: needed by requests
    that have one. A request whose logits are NaN or infinite, or whose grammar grows too complex, fails alone."""
    rows = logits.float().cpu().numpy()
    sampled: dict[str, int] = {}
    logprobs: dict[str, TokenLogprobs] = {}
    further: dict[str, list[DrawnToken]] = {}
    failed: dict[str, str] = {}
    first = 0
    for request in requests:
        name, drafts = request.request_id, request.token_ids[len(request.token_ids) - request.num_drafts :]
        try:
            drawn = _draw(rows[first], request.after_drafts(0) if drafts else request, grammars)
        except _NoDrawError as error:
            failed[name] = str(error)
        else:
            sampled[name] = drawn.token_id
            if drawn.logprobs is not None:
                logprobs[name] = drawn.logprobs
            if drafts and drawn.token_id == drafts[0]:
                behind = rows[first + 1 : first + 1 + len(drafts)]
                if tokens := _draw_further(behind, request, drafts, grammars):
                    further[name] = tokens
        first += 1 + request.num_drafts
    assert first == len(rows), f"{len(rows)} rows of logits for {first} draws"
    return StepResult(sampled=sampled, logprobs=logprobs, further=further, failed=failed)


class _NoDrawError(Exception):
    """A row is NaN or infinite, or a grammar can be followed no further."""


def _draw_further(
    rows: npt.NDArray[np.float32], request: ScheduledRequest, drafts: Sequence[int], grammars: Grammars | None
) -> list[DrawnToken]:
    """The draws behind right guesses, up to the first that gives another token than was guessed. Each is made exactly
    as the request would make it a step later; a row without numbers is left to that step."""
    drawn: list[DrawnToken] = []
    for count, row in enumerate(rows, start=1):
        try:
            drawn.append(_draw(row, request.after_drafts(count), grammars))
        except _NoDrawError:
            break
        if count == len(drafts) or drawn[-1].token_id != drafts[count]:
            break
    return drawn


def _draw(row: Row, request: ScheduledRequest, grammars: Grammars | None) -> DrawnToken:
    # argmax gives the first of several maxima, the lowest id; and a NaN wherever there is one.
    likeliest = int(row.argmax())
    if not np.isfinite(row[likeliest]):
        raise _NoDrawError(f"{NO_LOGITS}: they reach {row[likeliest]}")
    allowed = None
    if request.sampling.grammar is not None:
        assert grammars is not None, "a request with a grammar, and nobody to read it"
        try:
            allowed = grammars.allowed(request)
        except GrammarTooComplexError as error:
            raise _NoDrawError(str(error)) from error
    token = _pick(row, request, allowed, likeliest)
    wanted = request.sampling.logprobs
    return DrawnToken(token, None if wanted is None else token_logprobs(row, token, wanted))


def _pick(row: Row, request: ScheduledRequest, allowed: Mask | None, likeliest: int) -> int:
    params = request.sampling
    if params.changes_logits:
        row = apply_rules(row, params, request.history, allowed)
        likeliest = int(row.argmax())
    if params.temperature == 0.0:
        return likeliest
    position = request.start + len(request.token_ids)
    return distribution(row, params).draw(uniform(params.seed, position))
