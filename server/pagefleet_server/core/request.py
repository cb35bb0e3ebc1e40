"""One request inside the engine: its tokens, how far they are computed, and its state."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from pagefleet_server.core.prefix_hash import BlockHash, chain_root
from pagefleet_server.core.prompt_lookup import Drafter
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import TokenHistory

PLACEHOLDER_TOKEN_ID = -1
"""Stands for a token that a step in flight is drawing: the next step's input on the device only."""


class RequestState(Enum):
    """waiting -> running -> finished; running -> preempted -> running; any state -> finished by abort.
    A sibling goes from waiting to running when its leader's prompt is computed."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended; the values go over the wire."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestStateError(Exception):
    """A transition that the state machine does not have: a fault of the program."""


class Request:
    """State changes only through the named transitions; block_ids and the promise belong to the BlockTables.

    Tokens by position: [0, num_computed) have their KV in the cache or in a step in flight,
    [num_computed, num_tokens) are known, [num_tokens, num_tokens + num_pending) are being drawn. A step in flight may
    compute num_drafted guesses from num_computed on; they count for nothing until its draws say that they are right.
    """

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "block_ids",
        "drafter",
        "finish_reason",
        "first_scheduled_time",
        "is_muted",
        "last_step_id",
        "num_cached_tokens",
        "num_computed",
        "num_drafted",
        "num_pending",
        "num_pooled",
        "num_preemptions",
        "num_prompt",
        "num_registered",
        "num_scored",
        "number",
        "priority",
        "promised_blocks",
        "rank",
        "request_id",
        "root_hash",
        "sampling",
        "siblings",
        "state",
        "tenant",
        "token_ids",
        "waiting_since",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        arrival_time: float,
        number: int,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> None:
        self.request_id = request_id
        self.number = number
        """Counts arrivals; unique."""
        self.tenant = tenant
        self.priority = priority
        """The smaller, the more important."""
        self.rank = (priority, 0)
        """(priority, number of the first admission); set when it first runs. Smaller is more important: first to be
        scheduled, last to be preempted. Unique among requests that have run."""
        self.root_hash = chain_root(tenant, cache_salt)
        """Parent of its first block's hash."""
        self.siblings: list[Request] = []
        """Requests with the same prompt that begin when this one, their leader, has computed it."""
        self.is_muted = False
        """A leader that was aborted: it computes the prompt for its siblings and gets nothing itself."""
        self.token_ids = list(prompt_token_ids)
        """Prompt, then what was generated."""
        self.num_prompt = len(prompt_token_ids)
        self.sampling = sampling
        self.arrival_time = arrival_time
        self.waiting_since = arrival_time
        """Arrival, or the last preemption."""
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.first_scheduled_time: float | None = None
        self.num_computed = 0
        self.num_pending = 0
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache when it first ran."""
        self.num_preemptions = 0
        self.last_step_id = 0
        """The latest step with a row of this request; 0 before the first."""
        self.block_ids: list[int] = []
        self.promised_blocks = 0
        """Blocks set aside for tokens that are known but not yet scheduled."""
        self.block_hashes: list[BlockHash] = []
        """Of the first full blocks of token_ids, as far as someone asked."""
        self.num_registered = 0
        """Leading blocks of block_ids that the prefix cache has been told of."""
        self.num_drafted = 0
        """Guessed tokens behind the known ones that a step in flight computes and checks."""
        self.drafter: Drafter | None = None
        """Who guesses them; made at the first guess."""
        self.num_scored = 0
        """Prompt tokens after the first whose log-probabilities have been scheduled."""
        self.num_pooled = 0
        """Prompt tokens whose hidden states have been scheduled for the pooled one."""

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens drawn and known so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next draw, a pending one included; 1 is a decode."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def can_decode(self) -> bool:
        """Its next step has one known row and draws."""
        return self.num_remaining == 1 and not self.num_drafted and not self.is_complete_after_pending

    @property
    def num_to_score(self) -> int:
        """Prompt tokens whose log-probabilities are still owed."""
        if self.sampling.prompt_logprobs is None or self.is_muted:
            return 0
        return self.num_prompt - 1 - self.num_scored

    @property
    def is_complete_after_pending(self) -> bool:
        """True when the draws in flight reach max_tokens: nothing more to schedule."""
        return self.num_generated + self.num_pending >= self.sampling.max_tokens

    @property
    def num_seats(self) -> int:
        """Sequences that it stands for: itself unless muted, and its siblings."""
        return len(self.siblings) + (not self.is_muted)

    def history(self) -> TokenHistory | None:
        """A view of the known tokens for sampling rules that look back, right until the next one is received."""
        return TokenHistory(self.token_ids, self.num_prompt) if self.sampling.needs_history else None

    def inputs(self, count: int) -> tuple[int, ...]:
        """The next `count` input tokens, from num_computed on."""
        known = self.token_ids[self.num_computed : self.num_computed + count]
        if len(known) < count:
            known.extend([PLACEHOLDER_TOKEN_ID] * (count - len(known)))
        return tuple(known)

    def start(self, now: float, *, num_cached: int, admission: int) -> None:
        """Waiting or preempted -> running, with the first num_cached tokens already in the cache. `admission` counts
        admissions and fixes the rank at the first one."""
        self._leave(RequestState.WAITING, RequestState.PREEMPTED)
        if self.num_pending:
            raise RequestStateError(f"request {self.request_id} starts while a step draws its token")
        if self.first_scheduled_time is None:
            self.first_scheduled_time = now
            self.num_cached_tokens = num_cached
            self.rank = (self.priority, admission)
        self.state = RequestState.RUNNING
        self.num_computed = num_cached

    def score(self, count: int) -> tuple[int, tuple[int, ...]]:
        """The next `count` input tokens also score the prompt: (row to begin with, tokens to score), once each."""
        first = max(self.num_scored, self.num_computed)
        targets = tuple(self.token_ids[first + 1 : min(self.num_computed + count, self.num_prompt - 1) + 1])
        self.num_scored += len(targets)
        return first - self.num_computed, targets

    def pool(self, count: int) -> range:
        """Of the next `count` input tokens, those whose hidden states go into the pooled one, each once."""
        if self.sampling.pooling is None:
            return range(0)
        end = min(self.num_computed + count, self.num_prompt)
        begin = self.num_prompt - 1 if self.sampling.pooling == "last" else self.num_pooled
        first = max(begin, self.num_computed)
        if first >= end:
            return range(0)
        self.num_pooled = end
        return range(first - self.num_computed, end - self.num_computed)

    def start_as_fork(self, leader: Request, *, admission: int) -> None:
        """Waiting -> running beside the leader, whose step in flight draws this one's first token too."""
        self._leave(RequestState.WAITING)
        self.first_scheduled_time = leader.first_scheduled_time
        self.num_cached_tokens = leader.num_computed
        self.rank = (self.priority, admission)
        self.state = RequestState.RUNNING
        self.num_computed = leader.num_computed
        self.num_pending = 1
        self.last_step_id = leader.last_step_id

    def advance(self, count: int, *, step_id: int) -> bool:
        """`count` more tokens are in step `step_id`; True when it draws the next one."""
        self._leave(RequestState.RUNNING)
        draws = count == self.num_remaining
        self.num_computed += count
        self.num_pending += draws
        self.last_step_id = step_id
        return draws

    def receive(self, token_ids: Sequence[int]) -> None:
        """A pending draw has become known, and with it the draws behind guesses that were right."""
        self._leave(RequestState.RUNNING, RequestState.PREEMPTED)
        if self.num_pending < 1:
            raise RequestStateError(f"request {self.request_id} got a token that no step was drawing")
        if not 1 <= len(token_ids) <= 1 + self.num_drafted:
            raise RequestStateError(f"request {self.request_id}: {len(token_ids)} tokens for {self.num_drafted} drafts")
        self.num_pending -= 1
        self.num_drafted = 0
        self.token_ids += token_ids
        if self.state is RequestState.RUNNING:
            self.num_computed += len(token_ids) - 1

    def preempt(self, now: float) -> None:
        """Running -> preempted: what was computed is lost, what was generated is kept."""
        self._leave(RequestState.RUNNING)
        self.state = RequestState.PREEMPTED
        self.num_computed = 0
        self.num_preemptions += 1
        self.waiting_since = now

    def finish(self, reason: FinishReason) -> None:
        """Any live state -> finished."""
        self._leave(RequestState.WAITING, RequestState.RUNNING, RequestState.PREEMPTED)
        self.state = RequestState.FINISHED
        self.finish_reason = reason

    def stop_reason(self) -> FinishReason | None:
        """Whether the newest token ends it: a stop id (once min_tokens are there) before the length."""
        params = self.sampling
        if self.num_generated >= params.min_tokens and self.token_ids[-1] in params.stop_token_ids:
            return FinishReason.STOP
        if self.num_generated >= params.max_tokens:
            return FinishReason.LENGTH
        return None

    def _leave(self, *allowed: RequestState) -> None:
        if self.state not in allowed:
            raise RequestStateError(f"request {self.request_id} is {self.state.value}")
