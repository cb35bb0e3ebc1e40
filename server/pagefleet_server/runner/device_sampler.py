"""Drawing tokens where the logits are: a row of a vocabulary of 128,000 is half a megabyte, its token eight bytes.

For requests whose rules the device knows: temperature, top_k, top_p, min_p. All others (penalties, bias, bans,
grammars, log-probabilities) have their rows, and theirs alone, brought to the CPU. The draws are the same.
"""

import math
from collections.abc import Sequence

import torch

from pagefleet_kernels.backend import TokenSampler
from pagefleet_kernels.sampling_batch import SamplingBatch
from pagefleet_server.core.step import DrawnToken, ScheduledRequest, StepResult
from pagefleet_server.runner.distribution import TINY
from pagefleet_server.runner.grammars import Grammars
from pagefleet_server.runner.logprobs import NO_LOGITS
from pagefleet_server.runner.sampler import sample


def sample_on_device(
    sampler: TokenSampler, logits: torch.Tensor, requests: Sequence[ScheduledRequest], grammars: Grammars | None
) -> StepResult:
    """As sampler.sample, for logits [N, V] on the sampler's device."""
    plain: list[ScheduledRequest] = []
    plain_rows: list[int] = []
    others: list[ScheduledRequest] = []
    other_rows: list[int] = []
    first = 0
    for request in requests:
        rows = range(first, first + 1 + request.num_drafts)
        first = rows.stop
        if is_plain(request):
            plain.append(request)
            plain_rows += rows
        else:
            others.append(request)
            other_rows += rows
    assert first == logits.shape[0], f"{logits.shape[0]} rows of logits for {first} draws"
    result = sample(_rows(logits, other_rows), others, grammars) if others else StepResult(sampled={})
    tokens, peaks = _draw(sampler, _rows(logits, plain_rows), plain) if plain else ([], [])
    sampled, failed, further = dict(result.sampled), dict(result.failed), dict(result.further)
    first = 0
    for request in plain:
        own = slice(first, first + 1 + request.num_drafts)
        if math.isfinite(peaks[first]):
            sampled[request.request_id] = tokens[first]
            if known := _behind_right_guesses(request, tokens[own], peaks[own]):
                further[request.request_id] = known
        else:
            failed[request.request_id] = f"{NO_LOGITS}: they reach {peaks[first]}"
        first = own.stop
    return StepResult(sampled=sampled, logprobs=result.logprobs, further=further, failed=failed)


def _behind_right_guesses(request: ScheduledRequest, tokens: Sequence[int], peaks: Sequence[float]) -> list[DrawnToken]:
    """All of its rows were drawn from; those count whose input turned out to be what was drawn before. A row without
    numbers is left to a later step."""
    further: list[DrawnToken] = []
    guesses = request.token_ids[len(request.token_ids) - request.num_drafts :]
    for before, guess, token, peak in zip(tokens[:-1], guesses, tokens[1:], peaks[1:], strict=True):
        if before != guess or not math.isfinite(peak):
            break
        further.append(DrawnToken(token))
    return further


def is_plain(request: ScheduledRequest) -> bool:
    """The device knows all of its rules."""
    params = request.sampling
    return not (params.changes_logits or params.grammar or params.logprobs is not None)


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows, in order; all of them without a copy."""
    if len(rows) == logits.shape[0]:
        return logits
    return logits.index_select(0, torch.tensor(rows, dtype=torch.int64, device=logits.device))


def _draw(
    sampler: TokenSampler, logits: torch.Tensor, requests: Sequence[ScheduledRequest]
) -> tuple[list[int], list[float]]:
    """Of 1 + num_drafts rows for each request: tokens and the largest logits (NaN where there is one), brought back in
    one piece."""
    params = [request.sampling for request in requests for _ in range(1 + request.num_drafts)]
    floats = torch.tensor(
        [
            # What float32 takes for 0 is not greedy: the least it can divide by.
            [max(p.temperature, float(TINY)) if p.temperature > 0.0 else 0.0 for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
        ],
        dtype=torch.float32,
    ).to(logits.device)
    integers = torch.tensor(
        [
            [min(p.top_k, logits.shape[1]) for p in params],
            [_signed(p.seed) for p in params],
            [
                request.start + len(request.token_ids) - unknown
                for request in requests
                for unknown in range(request.num_drafts, -1, -1)
            ],
        ],
        dtype=torch.int64,
    ).to(logits.device)
    batch = SamplingBatch(
        temperature=floats[0],
        top_k=integers[0].to(torch.int32),
        top_p=floats[1],
        min_p=floats[2],
        seeds=integers[1],
        positions=integers[2],
    )
    tokens = sampler.sample(logits, batch)
    drawn, peaks = torch.stack([tokens.double(), logits.amax(-1).double()]).cpu().tolist()
    return [int(token) for token in drawn], peaks


def _signed(seed: int) -> int:
    """The low 64 bits as torch's int64 holds them."""
    low = seed & (2**64 - 1)
    return low - 2**64 if low >= 2**63 else low
