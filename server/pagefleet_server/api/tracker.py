"""Follows every request from the door to its end: one count of what waits, one place that moves the metrics."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagefleet_server.api.admission import FinishRate, Load
from pagefleet_server.api.metrics import Metrics
from pagefleet_server.wire import Gauges, RequestOutput, StepDone


@dataclass(slots=True)
class Group:
    """Requests with one prompt (n > 1): the first one computes it."""

    num_open: int
    on_end: "OnEnd | None" = None
    longest: int = 0
    """Generated tokens of the longest one that has ended."""


@dataclass(slots=True)
class Timing:
    """What happened to one request, and when; clock seconds."""

    arrival: float
    num_prompt: int
    max_tokens: int
    group: Group
    queued_tokens: int
    """Of the prompt, when this request is the one that computes it."""
    num_cached: int = 0
    """Prompt tokens that were in the cache."""
    num_preemptions: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


OnEnd = Callable[[Timing, str], None]
"""Called with each request that has ended, and the reason."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A request that was sent to the engine and not read yet."""

    ordinal: int
    """0 for the first one ever sent."""
    arrival: float
    num_blocks: int


class Tracker:
    """Counts: `arriving` (accepted, still being tokenised), unread (sent), and what the engine says."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._timings: dict[str, Timing] = {}
        self._unread: deque[Unread] = deque()
        self._num_sent = 0
        self._arriving: dict[object, tuple[int, float]] = {}
        self.num_queued_tokens = 0
        """Prompt tokens of requests that were sent to the engine and have not begun to run."""
        self.rate = FinishRate(clock)
        self.gauges: Gauges | None = None
        """The engine's last word; None before it, and after its death."""

    def arrive(self, key: object, count: int) -> float:
        """`count` requests are accepted under `key`; gives their arrival time."""
        now = self._clock()
        self._arriving[key] = (count, now)
        return now

    def sent(
        self,
        requests: Sequence[tuple[str, int]],
        *,
        arrival: float,
        num_prompt: int,
        num_blocks: int,
        on_end: OnEnd | None = None,
    ) -> None:
        """Requests (id, max_tokens) with one prompt of num_blocks blocks are on their way to the engine."""
        group = Group(len(requests), on_end)
        self._metrics.params_n.observe(len(requests))
        for number, (request_id, max_tokens) in enumerate(requests):
            queued = 0 if number else num_prompt
            self._timings[request_id] = Timing(arrival, num_prompt, max_tokens, group, queued)
            self.num_queued_tokens += queued
            self._unread.append(Unread(self._num_sent, arrival, 1 if number else num_blocks))
            self._num_sent += 1

    def left_door(self, key: object, count: int | None = None) -> None:
        """So many of `key` are sent. None: the rest is, or will never be."""
        waiting, arrival = self._arriving.pop(key, (0, 0.0))
        if count is not None and waiting > count:
            self._arriving[key] = (waiting - count, arrival)

    def ended(self, request_id: str, reason: str) -> None:
        """A request ends for a reason of the API's own: a stop string, a client that left, an error. Idempotent."""
        timing = self._timings.pop(request_id, None)
        if timing is None:
            return
        self._leave_queue(timing)
        self._leave_group(timing, reason)
        self._metrics.finished(reason)
        self.rate.note()
        if reason == "stop" and timing.last_token is not None:
            self._observe_end(timing, timing.last_token)

    def has_begun(self, request_id: str) -> bool:
        """Whether a step has computed something of it. False for one that has ended."""
        timing = self._timings.get(request_id)
        return timing is not None and timing.first_scheduled is not None

    def on_step(self, step: StepDone) -> None:
        """Every message of the running engine; its outputs come one by one, to on_output()."""
        self.gauges = step.gauges
        while self._unread and self._unread[0].ordinal < step.gauges.num_added:
            self._unread.popleft()
        if step.step_seconds is not None:
            self._metrics.step_seconds.observe(step.step_seconds)
            self._metrics.iteration_tokens.observe(step.step_tokens)
            for request_id in step.prefilling:
                if (timing := self._timings.get(request_id)) is not None:
                    self._begin(timing, step.time - step.step_seconds)

    def on_output(self, output: RequestOutput, now: float) -> None:
        """New tokens of a request, of a step that ended at `now`."""
        timing = self._timings.get(output.request_id)
        if timing is None:
            return  # ended by the API a moment ago
        metrics = self._metrics
        if output.first_scheduled_time is not None:
            self._begin(timing, output.first_scheduled_time)
        timing.num_cached = max(timing.num_cached, output.num_cached_tokens)
        timing.num_preemptions = max(timing.num_preemptions, output.num_preemptions)
        timing.num_draft_tokens = max(timing.num_draft_tokens, output.num_draft_tokens)
        timing.num_accepted_tokens = max(timing.num_accepted_tokens, output.num_accepted_tokens)
        if output.token_ids:
            metrics.generation_tokens.inc(len(output.token_ids))
            timing.num_tokens += len(output.token_ids)
            if timing.last_token is None:
                timing.first_token = now
                metrics.prompt(timing.num_prompt, timing.num_cached)
                metrics.first_token.observe(max(0.0, now - timing.arrival))
            else:
                metrics.token_gap.observe(max(0.0, now - timing.last_token))
            timing.last_token = now
        elif output.finish_reason == "length":  # an embedding: it ends with its prompt
            metrics.prompt(timing.num_prompt, timing.num_cached)
        if output.finish_reason is not None:
            del self._timings[output.request_id]
            self._leave_queue(timing)
            self._leave_group(timing, output.finish_reason)
            metrics.finished(output.finish_reason)
            self.rate.note()
            self._observe_end(timing, now)

    def on_death(self) -> None:
        """The engine is gone, with everything in it."""
        self.gauges = None
        self._unread.clear()
        for timing in self._timings.values():
            self._leave_queue(timing)

    @property
    def load(self) -> Load:
        """For admission."""
        gauges = self.gauges
        return Load(
            running=0 if gauges is None else gauges.num_running,
            waiting=0 if gauges is None else gauges.num_waiting,
            unread=len(self._unread) + sum(count for count, _ in self._arriving.values()),
        )

    @property
    def num_waiting(self) -> int:
        """Accepted requests of which nothing has been computed."""
        load = self.load
        return load.waiting + load.unread

    @property
    def blocks_waiting(self) -> int:
        """New blocks that they will need; those of prompts still being tokenised are not known, one each is counted."""
        queued = 0 if self.gauges is None else self.gauges.blocks_waiting
        unread = sum(item.num_blocks for item in self._unread)
        return queued + unread + sum(count for count, _ in self._arriving.values())

    @property
    def oldest_waiting_seconds(self) -> float:
        """Age of the oldest of them, 0 when nothing waits."""
        arrivals = [arrival for _, arrival in self._arriving.values()]
        arrivals += [item.arrival for item in self._unread]
        if self.gauges is not None and self.gauges.oldest_waiting_arrival is not None:
            arrivals.append(self.gauges.oldest_waiting_arrival)
        return max(0.0, self._clock() - min(arrivals)) if arrivals else 0.0

    def _begin(self, timing: Timing, scheduled: float) -> None:
        if timing.first_scheduled is None:
            timing.first_scheduled = scheduled
            self._metrics.queue_time.observe(max(0.0, scheduled - timing.arrival))
            self._leave_queue(timing)

    def _leave_group(self, timing: Timing, reason: str) -> None:
        group = timing.group
        group.num_open -= 1
        group.longest = max(group.longest, timing.num_tokens)
        if group.num_open == 0:
            self._metrics.longest_generated.observe(group.longest)
        if group.on_end is not None:
            group.on_end(timing, reason)

    def _leave_queue(self, timing: Timing) -> None:
        self.num_queued_tokens -= timing.queued_tokens
        timing.queued_tokens = 0

    def _observe_end(self, timing: Timing, now: float) -> None:
        metrics = self._metrics
        metrics.num_prompt.observe(timing.num_prompt)
        metrics.num_generated.observe(timing.num_tokens)
        metrics.params_max_tokens.observe(timing.max_tokens)
        metrics.num_computed.observe(timing.num_prompt - timing.num_cached)
        metrics.num_preemptions.observe(timing.num_preemptions)
        metrics.end_to_end.observe(max(0.0, now - timing.arrival))
        if timing.first_token is None:
            return
        scheduled = timing.arrival if timing.first_scheduled is None else timing.first_scheduled
        metrics.prefill_time.observe(max(0.0, timing.first_token - scheduled))
        metrics.decode_time.observe(max(0.0, now - timing.first_token))
        metrics.inference_time.observe(max(0.0, now - scheduled))
        if timing.num_tokens > 1:
            metrics.mean_token_gap.observe(max(0.0, now - timing.first_token) / (timing.num_tokens - 1))
