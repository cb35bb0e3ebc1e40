"""What one engine can hold and do: fixed at its start."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_server.core.prompt_lookup import SpeculationLimits
from pagefleet_server.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Raises ValueError on values that could never work together."""

    num_blocks: int
    """Usable blocks, >= 1."""
    block_size: int
    """Tokens per block, >= 1."""
    max_model_len: int
    """Prompt plus generated tokens of one request, >= 1; more than the blocks hold is never used."""
    max_num_seqs: int
    """Running requests, >= 1."""
    max_num_batched_tokens: int
    """Tokens of one step; >= max_num_seqs, so that every running request gets at least one."""
    max_step_seconds: float | None = None
    """Prompt chunks are cut so that a step with decodes in it takes no longer by prediction (but at least as long as
    its decodes take twice, or prompts would never get in). None: only max_num_batched_tokens cuts them."""
    speculation: SpeculationLimits | None = None
    """Guess tokens and check them in one step. None: one token a step."""
    max_num_waiting: int = 16384
    """Requests in the queue, a bound of last resort: the API refuses long before."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_step_seconds is not None and self.max_step_seconds <= 0:
            raise ValueError(f"max_step_seconds is {self.max_step_seconds}; it must be positive, or None for no limit")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs {self.max_num_seqs};"
                " raise the first or lower the second, or a running request could get no token in a step"
            )


def why_impossible(
    prompt_token_ids: Sequence[int], samplings: Sequence[SamplingParams], limits: SchedulerLimits
) -> str | None:
    """Why requests with one prompt can never run within the limits, with the numbers; None when they can."""
    shortest = min((sampling.max_tokens for sampling in samplings), default=0)
    num_tokens = len(prompt_token_ids) + max((sampling.num_drawn for sampling in samplings), default=0)
    draws = any(sampling.num_drawn for sampling in samplings)
    num_blocks = -(-(num_tokens - draws) // limits.block_size)  # the last token is drawn, never computed
    if not prompt_token_ids or shortest < 1:
        return "a request needs at least 1 prompt token and max_tokens of at least 1"
    if num_tokens > limits.max_model_len:
        return f"{num_tokens} tokens with max_tokens; the limit is {limits.max_model_len}"
    if num_blocks > limits.num_blocks:
        return f"{num_tokens} tokens with max_tokens need {num_blocks} blocks; there are {limits.num_blocks}"
    if len(samplings) > limits.max_num_seqs:
        return f"{len(samplings)} sequences at once; at most {limits.max_num_seqs} can run"
    if any(sampling.prompt_logprobs is not None for sampling in samplings[1:]):
        return "only the first of several requests with one prompt can ask for its prompt_logprobs"
    return None
