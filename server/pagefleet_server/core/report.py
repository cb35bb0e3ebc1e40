"""What the scheduler tells the loop after a step."""

from dataclasses import dataclass

from pagefleet_server.core.request import FinishReason
from pagefleet_server.core.step import TokenLogprobs


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
