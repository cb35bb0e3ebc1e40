"""The process boundary: messages between the API process and the engine process.

Length-prefixed msgpack over a local stream socket (a socketpair inherited by the child): 4 bytes big-endian length,
then one message. Both sides decode into the unions below; an unknown tag is an error, never skipped.
Times are CLOCK_MONOTONIC seconds, which both processes share.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import TokenLogprobs


class AddRequests(msgspec.Struct, tag="add", frozen=True):
    """API -> engine: run these, all with the same prompt, which is computed once. The API has checked that they can
    ever fit."""

    request_ids: list[str]
    """At least one; different from all that live."""
    prompt_token_ids: list[int]
    samplings: list[SamplingParams | int]
    """One for each id; a number stands for the first one with this seed."""
    arrival_time: float
    tenant: str = ""
    """Whose request it is: tenants get equal shares of a full engine and never share cached blocks."""
    cache_salt: str = ""
    """Only requests with the same salt share cached blocks."""
    priority: int = 0
    """The smaller, the more important: goes first, and takes the place of running requests with a larger one."""


def write_samplings(samplings: Sequence[SamplingParams]) -> list[SamplingParams | int]:
    """For AddRequests. Outputs of one request differ in their seeds, and its rules may be long."""
    first, *others = samplings
    return [
        first,
        *(other.seed if msgspec.structs.replace(other, seed=first.seed) == first else other for other in others),
    ]


def read_samplings(written: Sequence[SamplingParams | int]) -> list[SamplingParams]:
    """The inverse."""
    first = written[0]
    assert isinstance(first, SamplingParams)  # a sender of ours
    return [msgspec.structs.replace(first, seed=item) if isinstance(item, int) else item for item in written]


class AbortRequests(msgspec.Struct, tag="abort", frozen=True):
    """API -> engine: forget these (client gone, or a stop string was found). Unknown ids are fine."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache", frozen=True):
    """API -> engine: no request after this one finds blocks that were cached before it."""


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """API -> engine: end the process now; the API has already drained."""


ToEngine = AddRequests | AbortRequests | ResetPrefixCache | Stop


class Starting(msgspec.Struct, tag="starting", frozen=True):
    """Engine -> API: progress of the start-up."""

    phase: str
    """"load_weights", "allocate_kv", "warm_up"."""
    message: str
    done_bytes: int = 0
    """Of the weights, loaded by now."""
    total_bytes: int = 0
    """0: this message does not say."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Engine -> API, once: a warm-up step has run."""

    block_size: int
    num_blocks: int
    """Usable blocks: the null block is excluded."""
    max_model_len: int
    """Tokens; the model's limit capped by the flag and by what the blocks can hold."""
    eos_token_ids: list[int]
    vocab_size: int
    attention_backend: str
    start_seconds: dict[str, float]
    """Phase -> seconds it took."""
    linear_backend: str = ""
    """Name for the metrics, as attention_backend."""
    pooling: Literal["last", "mean"] | None = None
    """The model makes embeddings, of this kind, and no texts. None: it makes texts."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Engine -> API: the engine ends because of this. The process exits right after."""

    reason: str


class Gauges(msgspec.Struct, frozen=True):
    """State after the step (or while idle). free + cached + used = total."""

    num_running: int
    num_waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_used: int
    blocks_total: int
    blocks_waiting: int
    """New blocks that waiting requests need: prompt plus, for preempted ones, generated tokens; minus cached blocks."""
    oldest_waiting_arrival: float | None
    """Since when the longest waiting request has waited: its arrival, or its preemption. None when nothing waits."""
    num_added: int
    """Requests of AddRequests messages read since start: the API adds what it sent beyond that to `waiting`."""
    num_preemptions: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    num_drafts: int = 0
    """Times that a request got guesses of its next tokens."""
    num_draft_tokens: int = 0
    num_accepted_by_place: list[int] = []
    """How often the first, second ... guess was right; empty without speculation."""


class RequestOutput(msgspec.Struct, frozen=True):
    """New tokens of one request."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    """None while it runs; at its end "stop", "length", or "error" (`error` says why)."""
    first_scheduled_time: float | None = None
    """Given with the first output."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None
    is_refused: bool = False
    """The error is that it can never run here (the API checks first); otherwise the model failed on it."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each token, when SamplingParams.logprobs is set."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the next prompt tokens (the first has none), when SamplingParams.prompt_logprobs is set. They come before the
    first token, some at a time; such a message may have no token."""
    pooled: list[bytes] = []
    """Each float32, little-endian: what the next prompt tokens add to the pooled hidden state
    (SamplingParams.pooling)."""
    num_draft_tokens: int = 0
    """Guesses of its tokens so far."""
    num_accepted_tokens: int = 0
    """Of these, right ones."""


class StepDone(msgspec.Struct, tag="step", frozen=True):
    """Engine -> API: after each step; and once a second while idle, with no outputs and step_seconds None."""

    gauges: Gauges
    outputs: list[RequestOutput]
    time: float
    step_seconds: float | None = None
    step_tokens: int = 0
    prefilling: list[str] = []
    """Requests of which the step computed a part of the prompt that is not its end: they run without output so far."""


FromEngine = Starting | Ready | Failed | StepDone
