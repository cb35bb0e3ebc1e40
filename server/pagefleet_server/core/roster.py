"""Who waits and who runs, and the blocks they hold: every move of a request from one place to another."""

from bisect import insort
from collections.abc import Sequence

from pagefleet_server.core.audit import check_requests
from pagefleet_server.core.block_tables import BlockTables
from pagefleet_server.core.request import FinishReason, Request, RequestState
from pagefleet_server.core.waiting_queue import WaitingQueue, by_rank


class Roster:
    """The moves keep requests, queue and block tables in step; when to make them is the scheduler's choice."""

    def __init__(self, tables: BlockTables) -> None:
        self.tables = tables
        self.requests: dict[str, Request] = {}
        """All that live, by id; siblings that have not begun, too."""
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        """By rank: the most important first."""
        self.oldest_in_flight: int | None = None
        """Step id; blocks that it or a later step writes are released behind a fence. Kept by the scheduler."""
        self.num_preemptions = 0
        self.prefix_queries_tokens = 0
        self.prefix_hits_tokens = 0
        self._leaders: dict[str, Request] = {}  # id of a sibling that has not begun -> its leader
        self._num_admissions = 0

    @property
    def num_seats_taken(self) -> int:
        """Sequences that run, siblings of running leaders among them."""
        return sum(request.num_seats for request in self.running)

    def enqueue(self, leader: Request, siblings: Sequence[Request]) -> None:
        """New requests with one prompt begin to wait."""
        leader.siblings = list(siblings)
        for request in (leader, *siblings):
            self.requests[request.request_id] = request
        for sibling in siblings:
            self._leaders[sibling.request_id] = leader
        self.waiting.add(leader)
        self.tables.queue(leader)

    def admit(self, request: Request, now: float) -> None:
        """Waiting -> running, with the cached part of its tokens."""
        num_cached = self.tables.admit(request)
        if request.first_scheduled_time is None:
            self.prefix_queries_tokens += request.num_tokens
            self.prefix_hits_tokens += num_cached
        self.waiting.admit(request)
        self.tables.unqueue(request)
        self._num_admissions += 1
        request.start(now, num_cached=num_cached, admission=self._num_admissions)
        insort(self.running, request, key=by_rank)

    def preempt(self, request: Request, now: float) -> None:
        """Running -> waiting, without its blocks."""
        self.running.remove(request)
        self._release(request)
        request.preempt(now)
        self.waiting.put_back(request)
        self.tables.queue(request)
        self.num_preemptions += 1

    def fork(self, leader: Request) -> list[Request]:
        """The leader's prompt is computed by the step being planned: its siblings run from here on."""
        siblings, leader.siblings = leader.siblings, []
        for sibling in siblings:
            del self._leaders[sibling.request_id]
            self._num_admissions += 1
            self.tables.fork(leader, sibling)
            sibling.start_as_fork(leader, admission=self._num_admissions)
            insort(self.running, sibling, key=by_rank)
        return siblings

    def receive(self, request: Request, token_ids: Sequence[int]) -> None:
        """Drawn tokens have become known; the last one ends the request or not. Blocks of wrong guesses are free again,
        and the prefix cache hears of those that right ones filled."""
        was_drafted = request.num_drafted > 0
        request.receive(token_ids)
        if request.state is RequestState.PREEMPTED:  # drawn before it had to go: kept, and more to recompute
            self.tables.unqueue(request)
            self.tables.queue(request)
        elif was_drafted:
            self.tables.trim(request)
            self.tables.register(request)
        reason = request.stop_reason()
        if reason is not None:
            self.end(request, reason)

    def abort(self, request_id: str) -> bool:
        """Any state -> finished; False when the id is unknown. A leader goes on, muted, while siblings wait for it."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        leader = self._leaders.pop(request_id, None)
        if leader is not None:
            self._unseat(request, leader, FinishReason.ABORT)
        elif request.siblings:
            self._mute(request)
        else:
            self.end(request, FinishReason.ABORT)
        return True

    def end(self, request: Request, reason: FinishReason) -> None:
        """Any state -> finished; its blocks are free at once, or when the step that writes them is done."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
            self.tables.unqueue(request)
        self._release(request)
        request.finish(reason)
        if not request.is_muted:
            del self.requests[request.request_id]

    def fail(self, request: Request) -> list[Request]:
        """The model failed on it: it ends, and nobody shares what it computed. Gives those to be told: siblings that
        waited for it, too, but no muted leader."""
        told = [ended for ended in (request, *request.siblings) if not ended.is_muted]
        self.tables.forget(request)
        for sibling in list(request.siblings):
            del self._leaders[sibling.request_id]
            self._unseat(sibling, request, FinishReason.ERROR)
        if request.state is not RequestState.FINISHED:
            self.end(request, FinishReason.ERROR)
        return told

    def check_integrity(self, *, max_seats: int) -> None:
        """Raise AuditError or PoolError unless every conservation law holds. O(blocks + requests)."""
        self.tables.check_integrity(self.running, self.waiting)
        check_requests(self.requests, self.running, list(self.waiting), self.tables, max_seats=max_seats)

    def _mute(self, leader: Request) -> None:
        """It goes on for its siblings alone; while it waits, less is wanted for it."""
        waits = leader.state is not RequestState.RUNNING
        if waits:
            self.tables.unqueue(leader)
        leader.is_muted = True
        if waits:
            self.tables.queue(leader)
        del self.requests[leader.request_id]

    def _unseat(self, sibling: Request, leader: Request, reason: FinishReason) -> None:
        """A sibling that has not begun leaves; a muted leader without siblings has nobody to compute for."""
        waits = leader.state is not RequestState.RUNNING
        if waits:
            self.tables.unqueue(leader)
        leader.siblings.remove(sibling)
        if waits:
            self.tables.queue(leader)
        sibling.finish(reason)
        del self.requests[sibling.request_id]
        if not leader.num_seats:
            self.end(leader, reason)

    def _release(self, request: Request) -> None:
        in_flight = self.oldest_in_flight is not None and request.last_step_id >= self.oldest_in_flight
        self.tables.release(request, fence_step=request.last_step_id if in_flight else None)
