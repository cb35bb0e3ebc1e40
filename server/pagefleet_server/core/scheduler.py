"""Decides what each step computes, and takes in what came out. One token budget per step, no phases.

Order of a step: running requests that need one token (decodes), running requests with more to compute (prompt chunks),
then waiting requests while budget, sequences and blocks last. A request is let in only when all blocks of its known
tokens can be promised to it, so a chunk never lacks a block. A decode that finds none preempts the least important
running request; that one is recomputed later, its tokens kept. A waiting request of a more important priority takes
the place of less important running ones.

Why it cannot get stuck: the most important running request is never preempted for another of its priority, and by the
check in add() it fits into the pool alone; so as long as anything runs it gets a token per step, and when nothing runs
everything is free for the first that waits. schedule() checks exactly this and raises instead of idling.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_server.core.block_tables import BlockTables
from pagefleet_server.core.chunk_policy import ChunkPolicy
from pagefleet_server.core.limits import SchedulerLimits, why_impossible
from pagefleet_server.core.report import NewTokens, SchedulerCounts, failure_news, score_news, token_news
from pagefleet_server.core.request import FinishReason, Request, RequestState
from pagefleet_server.core.roster import Roster
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.speculation import Speculation
from pagefleet_server.core.step import SchedulerOutput, StepResult
from pagefleet_server.core.step_plan import StepPlan
from pagefleet_server.core.step_time import StepWork

MAX_STEPS_IN_FLIGHT = 1
"""Scheduled steps without update() when schedule() is called: 0 in a synchronous loop, 1 when steps overlap."""
HEADROOM_PERCENT = 1
"""Blocks kept open when a request joins running ones, so that their next blocks do not preempt it at once."""


MAX_SCORED_TOKENS = 64
"""Prompt tokens whose log-probabilities one step computes: bounds the memory of their logits."""


class SchedulerError(Exception):
    """The loop broke the protocol, or an invariant does not hold: a fault of the program."""


class RequestRefused(Exception):
    """This request can never run here; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    step_id: int
    drawing: tuple[Request, ...]  # requests that get a token
    scoring: tuple[Request, ...]  # requests that get log-probabilities of their prompts, or pooled hidden states
    work: StepWork


class Scheduler:
    """Synchronous and pure: times are passed in (any clock that does not go back), nothing is waited for."""

    def __init__(self, limits: SchedulerLimits, *, prefix_caching: bool = True) -> None:
        self.limits = limits
        self._roster = Roster(
            BlockTables(num_blocks=limits.num_blocks, block_size=limits.block_size, prefix_caching=prefix_caching)
        )
        self._tables = self._roster.tables
        self._requests = self._roster.requests
        self._waiting = self._roster.waiting
        self._running = self._roster.running
        self._in_flight: deque[_StepInFlight] = deque()
        self._chunks = ChunkPolicy(limits.max_step_seconds)
        self._speculation = Speculation(limits.speculation, self._tables)
        self._last_step_id = 0
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        """True while anything waits, runs, or is in a step in flight."""
        return bool(self._requests) or bool(self._in_flight)

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        arrival_time: float,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> None:
        """Queue one request: add_group() of one."""
        self.add_group(
            [request_id],
            prompt_token_ids,
            [sampling],
            arrival_time=arrival_time,
            tenant=tenant,
            cache_salt=cache_salt,
            priority=priority,
        )

    def add_group(
        self,
        request_ids: Sequence[str],
        prompt_token_ids: list[int],
        samplings: Sequence[SamplingParams],
        *,
        arrival_time: float,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> None:
        """Queue requests that share a prompt: the first computes it, the others fork from there.

        Raises RequestRefused when they can never run here, SchedulerError when an id is in use.
        """
        if len(request_ids) != len(samplings) or len(set(request_ids)) != len(request_ids):
            raise SchedulerError(f"{len(request_ids)} request ids, not all different, for {len(samplings)} samplings")
        for request_id in request_ids:
            if request_id in self._requests:
                raise SchedulerError(f"request id {request_id!r} is in use")
        first_number = self._num_added
        self._num_added += len(request_ids)
        reason = why_impossible(prompt_token_ids, samplings, self.limits)
        if reason is None and len(self._waiting) >= self.limits.max_num_waiting:
            reason = f"{len(self._waiting)} requests wait, the limit is {self.limits.max_num_waiting}"
        if reason is not None:
            raise RequestRefused(reason)
        leader, *siblings = (
            Request(
                request_id,
                prompt_token_ids,
                sampling,
                arrival_time=arrival_time,
                number=first_number + index,
                tenant=tenant,
                cache_salt=cache_salt,
                priority=priority,
            )
            for index, (request_id, sampling) in enumerate(zip(request_ids, samplings, strict=True))
        )
        self._roster.enqueue(leader, siblings)

    def abort(self, request_id: str) -> bool:
        """Forget a request in any state; its blocks are free at once, or when the step that writes them is done.
        False when the id is unknown (or has just ended)."""
        return self._roster.abort(request_id)

    def schedule(self, now: float) -> SchedulerOutput | None:
        """The next step, or None when there is nothing to do until update() or add().

        Raises SchedulerError when called with too many steps in flight, or when requests exist that nothing will move.
        """
        if len(self._in_flight) > MAX_STEPS_IN_FLIGHT:
            raise SchedulerError(f"{len(self._in_flight)} steps are in flight; update() is owed")
        plan = StepPlan(self._last_step_id + 1, self.limits.max_num_batched_tokens, MAX_SCORED_TOKENS)
        self._yield_to_priority(now)
        self._plan_decodes(now, plan)
        plan.num_prompts = self._num_prompts()
        for request in list(self._running):
            if request.num_remaining > 1 and (count := self._chunks.size(request, plan)) > 0:
                self._advance(request, count, plan)
        while (admitted := self._admit_first(now, plan)) is not None:
            self._advance(admitted, max(1, self._chunks.size(admitted, plan)), plan)
        if plan.is_empty:
            if self._requests and not self._in_flight:
                raise SchedulerError(
                    f"{len(self._running)} running and {len(self._waiting)} waiting requests, none can move"
                )
            return None
        self._last_step_id = plan.step_id
        self._in_flight.append(_StepInFlight(plan.step_id, tuple(plan.drawing), tuple(plan.scoring), plan.work))
        self._roster.oldest_in_flight = self._in_flight[0].step_id
        for request in [r for r in plan.drawing if r.is_muted]:
            self._roster.end(request, FinishReason.ABORT)
        return plan.output()

    def update(
        self, output: SchedulerOutput, result: StepResult, *, step_seconds: float | None = None
    ) -> list[NewTokens]:
        """Take in a finished step, the oldest in flight. Gives the new tokens, in the order of scheduling.
        `step_seconds`, how long it took, teaches the step-time model; None when it would mislead.

        Raises SchedulerError when the step is not the oldest, or a token is missing.
        """
        if not self._in_flight or self._in_flight[0].step_id != output.step_id:
            raise SchedulerError(f"step {output.step_id} is not the oldest in flight")
        step = self._in_flight.popleft()
        self._roster.oldest_in_flight = self._in_flight[0].step_id if self._in_flight else None
        self._tables.lift_fences(step.step_id)
        if step_seconds is not None:
            self._chunks.observe(step.work, step_seconds)
        news = self._failures(step, result)
        for request in step.drawing:
            if request.state is RequestState.FINISHED:
                continue  # aborted, failed, or ended by the step before: the token is stale
            token_id = result.sampled.get(request.request_id)
            if token_id is None:
                raise SchedulerError(f"step {step.step_id} drew no token for request {request.request_id}")
            is_first = request.num_generated == 0
            further = [drawn.token_id for drawn in result.further.get(request.request_id, ())]
            self._speculation.observe(request, len(further))
            self._waiting.charge(request.tenant, len(further))
            self._roster.receive(request, [token_id, *further])
            news.append(token_news(request, [token_id, *further], result, is_first=is_first))
        return [*self._scores(step, result), *news]

    def counts(self) -> SchedulerCounts:
        """The gauges. O(running + tenants that wait + preempted): asked for after each step, however long the queue."""
        pool = self._tables.pool
        num_running = self._roster.num_seats_taken
        return SchedulerCounts(
            num_running=num_running,
            num_waiting=len(self._requests) - num_running,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            blocks_used=pool.num_used,
            blocks_total=pool.num_blocks,
            blocks_promised=self._tables.num_promised,
            blocks_waiting=self._tables.num_wanted,
            oldest_waiting_since=self._waiting.oldest_since(),
            num_added=self._num_added,
            num_preemptions=self._roster.num_preemptions,
            prefix_queries_tokens=self._roster.prefix_queries_tokens,
            prefix_hits_tokens=self._roster.prefix_hits_tokens,
            num_drafts=self._speculation.totals.num_drafts,
            num_draft_tokens=self._speculation.totals.num_draft_tokens,
            num_accepted_by_place=tuple(self._speculation.totals.accepted_by_place),
        )

    def reset_prefix_cache(self) -> None:
        """Forget all cached content: no later request finds it. Running requests keep what they hold."""
        self._tables.pool.forget_cached()

    def check_integrity(self) -> None:
        """Raise AuditError or PoolError unless every conservation law holds. O(blocks + requests)."""
        self._roster.check_integrity(max_seats=self.limits.max_num_seqs)

    def _plan_decodes(self, now: float, plan: StepPlan) -> None:
        """One row for each request that decodes, and rows for guesses where there is room beyond that."""
        decodes = [request for request in self._running if request.can_decode]
        guesses = self._speculation.applies(
            decodes, num_running=self._roster.num_seats_taken, num_waiting=len(self._waiting)
        )
        for index, request in enumerate(decodes):
            if request.state is not RequestState.RUNNING or not self._make_room(request, now):
                continue
            num_unplanned = len(decodes) - index
            drafts = self._speculation.draft(request, plan, num_unplanned=num_unplanned) if guesses else ()
            self._advance(request, 1, plan, drafts)

    def _num_prompts(self) -> int:
        """Running requests with more than one token to compute, and waiting ones as far as there are seats."""
        entering = sum(request.num_remaining > 1 for request in self._running)
        return entering + min(len(self._waiting), self.limits.max_num_seqs - self._roster.num_seats_taken)

    def _yield_to_priority(self, now: float) -> None:
        """Preempt less important running requests when that lets the first waiting one in."""
        first = self._waiting.first()
        if first is None:
            return
        lower = [request for request in self._running if request.priority > first.priority]
        if not lower or not self._can_enter_without(lower, first):
            return
        for victim in reversed(lower):
            missing = self._tables.missing(first, headroom=self._headroom(first))
            if missing <= self._tables.num_fenced and self._has_seats_for(first):
                return
            self._roster.preempt(victim, now)

    def _can_enter_without(self, lower: list[Request], first: Request) -> bool:
        """Whether it would be of use to preempt them all: blocks may be shared with others, and others have seats."""
        seats = self._roster.num_seats_taken - sum(request.num_seats for request in lower) + first.num_seats
        headroom = self._headroom(first) if len(lower) < len(self._running) else 0
        missing = self._tables.missing(first, headroom=headroom, without=lower)
        return seats <= self.limits.max_num_seqs and missing <= self._tables.num_fenced

    def _make_room(self, request: Request, now: float) -> bool:
        """Free a block for the request's next token if it needs one; False when it must sit this step out."""
        wanted = request.num_computed + 1
        while (shortage := self._tables.shortage(request, wanted)) > 0:
            if shortage <= self._tables.num_fenced:
                return False  # blocks are on their way: nobody else has to go
            victim = self._running[-1]
            self._roster.preempt(victim, now)
            if victim is request:
                return False
        return True

    def _headroom(self, request: Request) -> int:
        """Blocks to be left open when the request joins others; none when it runs alone."""
        if not self._running:
            return 0
        return -(-self.limits.num_blocks * HEADROOM_PERCENT // 100) + self._tables.copies_for(request)

    def _has_seats_for(self, request: Request) -> bool:
        return self._roster.num_seats_taken + request.num_seats <= self.limits.max_num_seqs

    def _admit_first(self, now: float, plan: StepPlan) -> Request | None:
        request = self._waiting.first()
        if request is None or self._chunks.size(request, plan) < 1:
            return None
        if request.num_pending or not self._has_seats_for(request):
            return None  # pending: preempted in this very step, its last token is still in flight
        if self._tables.missing(request, headroom=self._headroom(request)):
            return None
        self._roster.admit(request, now)
        return request

    def _advance(self, request: Request, count: int, plan: StepPlan, drafts: tuple[int, ...] = ()) -> None:
        start = request.num_computed
        token_ids = (*request.inputs(count), *drafts)
        scored_from, prompt_targets = request.score(count) if request.num_to_score else (0, ())
        pooled_rows = request.pool(count)
        copy = self._tables.write(request, start + len(token_ids), step_id=plan.step_id)
        if copy is not None:
            plan.copies.append(copy)
        draws = request.advance(count, step_id=plan.step_id)
        request.num_drafted = len(drafts)
        self._tables.register(request)
        self._waiting.charge(request.tenant, count)
        plan.add(
            request,
            token_ids,
            start=start,
            draws=draws,
            forks=self._roster.fork(request) if draws else [],
            num_drafts=len(drafts),
            scored_from=scored_from,
            prompt_targets=prompt_targets,
            pooled_rows=pooled_rows,
        )

    def _failures(self, step: _StepInFlight, result: StepResult) -> list[NewTokens]:
        """End the requests that the model failed on."""
        news = []
        for request in dict.fromkeys((*step.scoring, *step.drawing)):
            reason = result.failed.get(request.request_id)
            if reason is not None and request.state is not RequestState.FINISHED:
                news += [failure_news(ended, reason) for ended in self._roster.fail(request)]
        return news

    def _scores(self, step: _StepInFlight, result: StepResult) -> list[NewTokens]:
        """Prompt tokens that this step scored or pooled, for requests that still live, ahead of their tokens."""
        news = []
        for request in step.scoring:
            if request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR) or request.is_muted:
                continue
            if request.request_id not in result.prompt_logprobs and request.request_id not in result.pooled:
                raise SchedulerError(f"step {step.step_id} did not score the prompt of request {request.request_id}")
            news.append(score_news(request, result))
        return news
