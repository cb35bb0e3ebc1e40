"""What one engine step computes: the value objects between scheduler and runner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from pagefleet_server.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """What a request has seen, for rules that look back (SamplingParams.needs_history)."""

    token_ids: Sequence[int]
    """Prompt, then what was generated; read-only, and right until the step is over."""
    num_prompt: int
    """token_ids[num_prompt:] were generated."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A further request that draws its first token from the same row of logits: it shares the prompt's blocks."""

    request_id: str
    sampling: SamplingParams
    history: TokenHistory | None = None
    """Given when sampling.needs_history."""


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
    history: TokenHistory | None = None
    """Given when `sample` is set and sampling.needs_history."""
    prompt_targets: tuple[int, ...] = ()
    """Prompt tokens to be scored: prompt_targets[i] follows row scored_from + i, whose logits say how likely it was."""
    scored_from: int = 0
    """Index into token_ids of the first row to score with."""
    pooled_rows: range = range(0)
    """Indices into token_ids whose hidden states are summed into StepResult.pooled; empty: none."""
    forks: tuple[Fork, ...] = ()
    """Only when `sample` is set: the result holds one token for each of these, too."""
    num_drafts: int = 0
    """The last so many of token_ids are guesses, and `sample` is set: a token is drawn behind the last one that is
    known, and behind each guess as long as the draw before it gave just that guess (StepResult.further)."""

    def after_drafts(self, count: int) -> "ScheduledRequest":
        """The request as it would stand had `count` of its guesses been known: it draws behind the last of them."""
        end = len(self.token_ids) - self.num_drafts + count
        history = self.history
        if history is not None and count:
            drafts = self.token_ids[end - count : end]
            history = TokenHistory([*history.token_ids, *drafts], history.num_prompt)
        return replace(self, token_ids=self.token_ids[:end], history=history, num_drafts=0)


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
    copies: tuple[tuple[int, int], ...] = ()
    """(source, destination) blocks to copy whole, in every layer, before this step writes anything. Destinations are
    distinct and are no sources."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model found a drawn token, before temperature and every other rule."""

    logprob: float
    """Natural logarithm of the drawn token's probability."""
    rank: int
    """1 for the likeliest; equal tokens share the better rank."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the likeliest, falling, lower ids first among equals; as many as were asked for."""


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """A token that was drawn behind a guess that was right."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    """When the request asked."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner gives back: one token for each request with `sample` set, and for each of its forks."""

    sampled: dict[str, int]
    """request_id -> token id."""
    logprobs: Mapping[str, TokenLogprobs] = field(default_factory=lambda: MappingProxyType({}))
    """request_id -> of its token, for requests that asked (SamplingParams.logprobs)."""
    further: Mapping[str, Sequence[DrawnToken]] = field(default_factory=lambda: MappingProxyType({}))
    """request_id -> the tokens that follow the one in `sampled`, for requests with a right guess: one for each."""
    prompt_logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=lambda: MappingProxyType({}))
    """request_id -> of its prompt_targets, for rows that have some."""
    pooled: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))
    """request_id -> float32, little-endian: the sum over its pooled_rows, for rows that have some. Such a request's
    token means nothing."""
    failed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """request_id -> why it has no token (or no scores): it ends with this reason, the others go on."""
