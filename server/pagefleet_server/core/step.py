"""What one engine step computes: the value objects between scheduler and runner."""

from dataclasses import dataclass

from pagefleet_server.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step.

    The step computes the KV of `token_ids` at positions [start, start + len(token_ids)) and, when `sample` is set,
    draws the token at position start + len(token_ids) from the last row's logits.
    """

    request_id: str
    token_ids: tuple[int, ...]
    """Input tokens of this step, at least one. Only when the runner overlaps steps may the last be -1 (a placeholder):
    the token that the step before draws for this request."""
    start: int
    """Position of token_ids[0]: the number of tokens whose KV is already in the cache."""
    block_ids: tuple[int, ...]
    """Block table: block_ids[i] holds positions [i * block_size, (i + 1) * block_size). Covers the end of this step."""
    sample: bool
    """False for a prompt chunk that does not reach the prompt's end."""
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: decode rows (one token each, sampling) come first, then prompt chunks."""

    scheduled: tuple[ScheduledRequest, ...]
    num_decodes: int
    """scheduled[:num_decodes] have exactly one input token."""
    num_tokens: int
    """Sum of len(token_ids)."""
    step_id: int = 0
    """1, 2, 3 ... in the order of scheduling."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner gives back: one token for each request with `sample` set."""

    sampled: dict[str, int]
    """request_id -> token id."""
