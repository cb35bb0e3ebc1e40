"""Decides what each step computes, and takes in what came out. One token budget per step, no phases.

Order of a step: running requests that need one token (decodes), running requests with more to compute (prompt chunks),
then waiting requests while budget, sequences and blocks last. A request is let in only when all blocks of its known
tokens can be promised to it, so a chunk never lacks a block. A decode that finds none preempts the least important
running request; that one is recomputed later, its tokens kept.

Why it cannot get stuck: the most important running request is never preempted for another, and by the check in add()
it fits into the pool alone; so as long as anything runs it gets a token per step, and when nothing runs everything is
free for the first that waits. schedule() checks exactly this and raises instead of idling.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass

from pagefleet_server.core.block_tables import BlockTables
from pagefleet_server.core.limits import SchedulerLimits
from pagefleet_server.core.report import NewTokens, SchedulerCounts
from pagefleet_server.core.request import FinishReason, Request, RequestState
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import ScheduledRequest, SchedulerOutput, StepResult
from pagefleet_server.core.waiting_queue import WaitingQueue, by_order

MAX_STEPS_IN_FLIGHT = 1
"""Scheduled steps without update() when schedule() is called: 0 in a synchronous loop, 1 when steps overlap."""
HEADROOM_PERCENT = 1
"""Blocks kept open when a request joins running ones, so that their next blocks do not preempt it at once."""


class SchedulerError(Exception):
    """The loop broke the protocol, or an invariant does not hold: a fault of the program."""


class RequestRefused(Exception):
    """This request can never run here; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    step_id: int
    drawing: tuple[Request, ...]  # requests that get a token


class Scheduler:
    """Synchronous and pure: times are passed in (any clock that does not go back), nothing is waited for."""

    def __init__(self, limits: SchedulerLimits, *, prefix_caching: bool = True) -> None:
        self.limits = limits
        self._tables = BlockTables(
            num_blocks=limits.num_blocks, block_size=limits.block_size, prefix_caching=prefix_caching
        )
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # by order
        self._in_flight: deque[_StepInFlight] = deque()
        self._last_step_id = 0
        self._num_added = 0
        self._num_preemptions = 0
        self._prefix_queries_tokens = 0
        self._prefix_hits_tokens = 0

    @property
    def has_requests(self) -> bool:
        """True while anything waits or runs."""
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """True while anything waits, runs, or is in a step in flight."""
        return bool(self._requests) or bool(self._in_flight)

    def add(
        self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams, *, arrival_time: float
    ) -> None:
        """Queue a request. Raises RequestRefused when it can never run here, SchedulerError when the id is in use."""
        if request_id in self._requests:
            raise SchedulerError(f"request id {request_id!r} is in use")
        self._num_added += 1
        self._refuse_impossible(prompt_token_ids, sampling)
        request = Request(request_id, prompt_token_ids, sampling, arrival_time=arrival_time, order=self._num_added)
        self._requests[request_id] = request
        self._waiting.add(request)
        self._tables.queue(request)

    def abort(self, request_id: str) -> bool:
        """Forget a request in any state; its blocks are free at once, or when the step that writes them is done.
        False when the id is unknown (or has just ended)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, FinishReason.ABORT)
        return True

    def schedule(self, now: float) -> SchedulerOutput | None:
        """The next step, or None when there is nothing to do until update() or add().

        Raises SchedulerError when called with too many steps in flight, or when requests exist that nothing will move.
        """
        if len(self._in_flight) > MAX_STEPS_IN_FLIGHT:
            raise SchedulerError(f"{len(self._in_flight)} steps are in flight; update() is owed")
        step_id = self._last_step_id + 1
        budget = self.limits.max_num_batched_tokens
        rows: list[ScheduledRequest] = []
        drawing: list[Request] = []

        preemptions_before = self._num_preemptions
        for request in [r for r in self._running if r.num_remaining == 1 and not r.is_complete_after_pending]:
            if request.state is RequestState.RUNNING and self._make_room(request, now):
                rows.append(self._advance(request, 1, step_id, drawing))
                budget -= 1
        num_decodes = len(rows)

        for request in self._running:
            if budget > 0 and request.num_remaining > 1:
                count = min(request.num_remaining, budget)
                rows.append(self._advance(request, count, step_id, drawing))
                budget -= count

        singles: list[ScheduledRequest] = []
        if self._num_preemptions == preemptions_before:
            while budget > 0 and (admitted := self._admit_first(now)) is not None:
                count = min(admitted.num_remaining, budget)
                row = self._advance(admitted, count, step_id, drawing)
                (singles if count == 1 and row.sample else rows).append(row)
                budget -= count

        if not rows and not singles:
            if self._requests and not self._in_flight:
                raise SchedulerError(
                    f"{len(self._running)} running and {len(self._waiting)} waiting requests, none can move"
                )
            return None
        self._last_step_id = step_id
        self._in_flight.append(_StepInFlight(step_id, tuple(drawing)))
        return SchedulerOutput(
            scheduled=(*rows[:num_decodes], *singles, *rows[num_decodes:]),
            num_decodes=num_decodes + len(singles),
            num_tokens=self.limits.max_num_batched_tokens - budget,
            step_id=step_id,
        )

    def update(self, output: SchedulerOutput, result: StepResult, now: float) -> list[NewTokens]:
        """Take in a finished step, the oldest in flight. Gives the new tokens, in the order of scheduling.

        Raises SchedulerError when the step is not the oldest, or a token is missing.
        """
        if not self._in_flight or self._in_flight[0].step_id != output.step_id:
            raise SchedulerError(f"step {output.step_id} is not the oldest in flight")
        step = self._in_flight.popleft()
        self._tables.lift_fences(step.step_id)
        news: list[NewTokens] = []
        for request in step.drawing:
            if request.state is RequestState.FINISHED:
                continue  # aborted, or ended by the step before: the token is stale
            token_id = result.sampled.get(request.request_id)
            if token_id is None:
                raise SchedulerError(f"step {step.step_id} drew no token for request {request.request_id}")
            first = request.num_generated == 0
            request.receive(token_id)
            if request.state is RequestState.PREEMPTED:  # drawn before it had to go: kept, and one more to recompute
                self._tables.unqueue(request)
                self._tables.queue(request)
            reason = request.stop_reason()
            if reason is not None:
                self._end(request, reason)
            news.append(
                NewTokens(
                    request_id=request.request_id,
                    token_ids=[token_id],
                    finish_reason=reason,
                    first_scheduled_time=request.first_scheduled_time if first else None,
                    num_cached_tokens=request.num_cached_tokens,
                    num_preemptions=request.num_preemptions,
                )
            )
        return news

    def counts(self) -> SchedulerCounts:
        """The gauges. O(waiting)."""
        pool = self._tables.pool
        return SchedulerCounts(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            blocks_used=pool.num_used,
            blocks_total=pool.num_blocks,
            blocks_waiting=self._tables.num_wanted,
            oldest_waiting_since=min((request.waiting_since for request in self._waiting), default=None),
            num_added=self._num_added,
            num_preemptions=self._num_preemptions,
            prefix_queries_tokens=self._prefix_queries_tokens,
            prefix_hits_tokens=self._prefix_hits_tokens,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False while any block is held."""
        return self._tables.pool.forget_cached()

    def check_integrity(self) -> None:
        """Raise SchedulerError or PoolError unless every conservation law holds. O(blocks + requests)."""
        self._tables.check_integrity(self._running)
        orders = [request.order for request in self._running]
        if orders != sorted(set(orders)) or len(orders) > self.limits.max_num_seqs:
            raise SchedulerError(f"running requests out of order or too many: {orders}")
        if {r.request_id for r in self._running} | {r.request_id for r in self._waiting} != set(self._requests):
            raise SchedulerError("a request is lost, or in two places")
        for request in self._running:
            held = len(request.block_ids)
            if request.state is not RequestState.RUNNING or held != self._tables.blocks_for(request.num_computed):
                raise SchedulerError(f"request {request.request_id}: {held} blocks for {request.num_computed} tokens")
            if not 0 <= request.num_pending <= MAX_STEPS_IN_FLIGHT + 1 or request.num_remaining < 0:
                raise SchedulerError(f"request {request.request_id}: {request.num_pending} tokens pending")
        for request in self._waiting:
            if request.block_ids or request.promised_blocks or request.state not in _QUEUED:
                raise SchedulerError(f"waiting request {request.request_id} holds blocks or has a wrong state")

    def _refuse_impossible(self, prompt_token_ids: list[int], sampling: SamplingParams) -> None:
        num_tokens = len(prompt_token_ids) + sampling.max_tokens
        if not prompt_token_ids or sampling.max_tokens < 1:
            raise RequestRefused("a request needs at least 1 prompt token and max_tokens of at least 1")
        if num_tokens > self.limits.max_model_len:
            raise RequestRefused(f"{num_tokens} tokens with max_tokens; the limit is {self.limits.max_model_len}")
        # The last token is drawn, never computed.
        if self._tables.blocks_for(num_tokens - 1) > self.limits.num_blocks:
            raise RequestRefused(
                f"{num_tokens} tokens with max_tokens need {self._tables.blocks_for(num_tokens - 1)} blocks;"
                f" there are {self.limits.num_blocks}"
            )
        if len(self._waiting) >= self.limits.max_num_waiting:
            raise RequestRefused(f"{len(self._waiting)} requests wait, the limit is {self.limits.max_num_waiting}")

    def _make_room(self, request: Request, now: float) -> bool:
        """Free a block for the request's next token if it needs one; False when it must sit this step out."""
        wanted = request.num_computed + 1
        while (shortage := self._tables.shortage(request, wanted)) > 0:
            if shortage <= self._tables.num_fenced:
                return False  # blocks are on their way: nobody else has to go
            victim = self._running[-1]
            self._preempt(victim, now)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request, now: float) -> None:
        self._running.remove(request)
        self._release(request)
        request.preempt(now)
        self._waiting.put_back(request)
        self._tables.queue(request)
        self._num_preemptions += 1

    def _admit_first(self, now: float) -> Request | None:
        request = self._waiting.first()
        if request is None or len(self._running) >= self.limits.max_num_seqs:
            return None
        headroom = -(-self.limits.num_blocks * HEADROOM_PERCENT // 100) if self._running else 0
        num_cached = self._tables.admit(request, headroom=headroom)
        if num_cached is None:
            return None
        if request.first_scheduled_time is None:
            self._prefix_queries_tokens += request.num_tokens
            self._prefix_hits_tokens += num_cached
        self._waiting.remove(request)
        self._tables.unqueue(request)
        request.start(now, num_cached=num_cached)
        insort(self._running, request, key=by_order)
        return request

    def _advance(self, request: Request, count: int, step_id: int, drawing: list[Request]) -> ScheduledRequest:
        start = request.num_computed
        token_ids = request.inputs(count)
        self._tables.grow(request, start + count)
        draws = request.advance(count, step_id=step_id)
        self._tables.register(request)
        if draws:
            drawing.append(request)
        return ScheduledRequest(
            request_id=request.request_id,
            token_ids=token_ids,
            start=start,
            block_ids=tuple(request.block_ids),
            sample=draws,
            sampling=request.sampling,
            history=request.history() if draws and request.sampling.needs_history else None,
        )

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
            self._tables.unqueue(request)
        self._release(request)
        request.finish(reason)
        del self._requests[request.request_id]

    def _release(self, request: Request) -> None:
        in_flight = bool(self._in_flight) and request.last_step_id >= self._in_flight[0].step_id
        self._tables.release(request, fence_step=request.last_step_id if in_flight else None)


_QUEUED = (RequestState.WAITING, RequestState.PREEMPTED)
