"""The server's scheduler, with a short cut through runs of steps that only decode.

Why the short cut is exact. Between two arrivals the scheduler changes course only when a request ends, when a prompt
chunk is computed, or when blocks run short. As long as every running request decodes, no request reaches its last
token, the first waiting request cannot get in (it lacks seats or blocks, and both only get scarcer) and the open
blocks are enough, each step does the same: one token more for each. `count` such steps take the same blocks from the
head of the same queue, register the same content and draw the same tokens as one after the other; only the order in
which block numbers go to requests differs, and nothing depends on block numbers. A test compares both ways.
"""

from collections.abc import Callable

from pagefleet_server.core.request import Request
from pagefleet_server.core.scheduler import Scheduler


class SkippingScheduler(Scheduler):
    """A Scheduler that can also make several decode steps at once, while none is in flight."""

    @property
    def num_running(self) -> int:
        """Requests that hold a seat."""
        return len(self._running)

    def decodes_alone(self) -> list[Request]:
        """The running requests when the next step, and the ones after it, only decode them; else none."""
        if self._in_flight or not self._running:
            return []
        for request in self._running:
            if request.num_remaining != 1 or request.num_pending or request.siblings or not request.num_generated:
                return []
        first = self._waiting.first()
        if first is None:
            return self._running
        blocked = not self._has_seats_for(first) or self._tables.missing(first, headroom=self._headroom(first)) > 0
        is_level = all(request.priority <= first.priority for request in self._running)
        return self._running if blocked and is_level else []

    def most_decodes(self, running: list[Request], limit: int) -> int:
        """How many steps in which no request ends and blocks suffice, at most `limit`; 0: none."""
        count = min(limit, min(request.sampling.max_tokens - request.num_generated for request in running) - 1)
        while count > 0:
            wanted = 0
            for request in running:
                new = self._tables.blocks_for(request.num_computed + count) - len(request.block_ids)
                if new > request.promised_blocks:
                    wanted += new - request.promised_blocks
            if wanted <= self._tables.num_open:
                return count
            count //= 2
        return 0

    def decode(self, running: list[Request], count: int, drawn: Callable[[str], int]) -> None:
        """Make `count` steps, each of which draws `drawn(request id)` for every running request. No two requests may
        come to the same text: which of two blocks with one content is kept depends on the order of registering."""
        self._last_step_id += count
        for request in running:
            self._tables.write(request, request.num_computed + count, step_id=self._last_step_id)
            request.num_computed += count
            request.token_ids.extend([drawn(request.request_id)] * count)
            request.last_step_id = self._last_step_id
            self._tables.register(request)
            self._waiting.charge(request.tenant, count)
