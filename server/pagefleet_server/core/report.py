"""What the scheduler tells the loop after a step."""

from dataclasses import dataclass

from pagefleet_server.core.request import FinishReason, Request
from pagefleet_server.core.step import StepResult, TokenLogprobs


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens that one request got in one step."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    """None while it runs."""
    first_scheduled_time: float | None
    """Given with the first token only."""
    num_cached_tokens: int
    num_preemptions: int
    logprobs: list[TokenLogprobs] | None
    """One for each token, when the request asked for them."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the next prompt tokens (the second is the first to have one), when the request asked for them; then
    token_ids may be empty."""
    pooled: bytes | None = None
    """Part of the prompt's pooled hidden state (StepResult.pooled): parts add up."""
    error: str | None = None
    """Why it ended with FinishReason.ERROR."""
    num_draft_tokens: int = 0
    """Guesses of its tokens so far."""
    num_accepted_tokens: int = 0
    """Of these, right ones."""


@dataclass(frozen=True, slots=True)
class SchedulerCounts:
    """The state now, and totals since start. blocks_free + blocks_cached + blocks_used = blocks_total."""

    num_running: int
    num_waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_used: int
    blocks_total: int
    blocks_promised: int
    """Of the free and cached ones, blocks set aside for prompts that are being computed."""
    blocks_waiting: int
    """New blocks that the waiting requests need for the tokens they have, minus those already cached."""
    oldest_waiting_since: float | None
    num_added: int
    num_preemptions: int
    prefix_queries_tokens: int
    """Tokens of requests at their first admission."""
    prefix_hits_tokens: int
    """Of these, tokens whose KV was in the cache."""
    num_drafts: int = 0
    """Times that a request got guesses in a step."""
    num_draft_tokens: int = 0
    """Guesses in all."""
    num_accepted_by_place: tuple[int, ...] = ()
    """How often the first, second ... guess was right; empty without speculation."""


def token_news(request: Request, token_ids: list[int], result: StepResult, *, is_first: bool) -> NewTokens:
    """The tokens that a step drew, after the request has taken them in."""
    logprobs = result.logprobs.get(request.request_id)
    further = (drawn.logprobs for drawn in result.further.get(request.request_id, ()))
    drafter = request.drafter
    return NewTokens(
        request_id=request.request_id,
        token_ids=[] if request.sampling.pooling else token_ids,
        finish_reason=request.finish_reason,
        first_scheduled_time=request.first_scheduled_time if is_first else None,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        logprobs=None if logprobs is None else [logprobs, *(known for known in further if known is not None)],
        num_draft_tokens=0 if drafter is None else drafter.num_drafted,
        num_accepted_tokens=0 if drafter is None else drafter.num_accepted,
    )


def failure_news(request: Request, reason: str) -> NewTokens:
    """The end of a request that failed."""
    return NewTokens(
        request_id=request.request_id,
        token_ids=[],
        finish_reason=FinishReason.ERROR,
        first_scheduled_time=None,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        logprobs=None,
        error=reason,
    )


def score_news(request: Request, result: StepResult) -> NewTokens:
    """The log-probabilities of the next prompt tokens, or what they add to the pooled one; no drawn token."""
    scores = result.prompt_logprobs.get(request.request_id)
    return NewTokens(
        request_id=request.request_id,
        token_ids=[],
        finish_reason=None,
        first_scheduled_time=None,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        logprobs=None if request.sampling.logprobs is None else [],
        prompt_logprobs=None if scores is None else list(scores),
        pooled=result.pooled.get(request.request_id),
    )
