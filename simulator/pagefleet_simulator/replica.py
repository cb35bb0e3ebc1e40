"""One simulated pod: the server's scheduler and block pool under a step-time model, advanced in virtual time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagefleet_operator.fleet import Sample
from pagefleet_operator.latency import Latencies
from pagefleet_server.api.metric_names import FIRST_TOKEN_BUCKETS, TOKEN_GAP_BUCKETS
from pagefleet_server.core.request import Request
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.scheduler import RequestRefused
from pagefleet_server.core.step import SchedulerOutput, StepResult
from pagefleet_simulator.histogram import Observations
from pagefleet_simulator.profile import Profile
from pagefleet_simulator.skipping import SkippingScheduler
from pagefleet_simulator.workload import Arrival

FIRST_PRIVATE_TOKEN_ID = 1 << 40
"""Token ids of prompts that share nothing, one id a request; below it are the names of shared pieces."""

MAX_SKIPPED_STEPS = 100_000


@dataclass(slots=True)
class Served:
    """One request's way through a pod."""

    number: int
    arrival: Arrival
    client: int = 0
    connection: int = 0
    first_scheduled: float | None = None
    """When its first step began."""
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    failed: bool = False

    @property
    def time_to_first_token(self) -> float:
        """Seconds; infinite when there was none."""
        return math.inf if self.first_token is None else self.first_token - self.arrival.time

    @property
    def time_per_token(self) -> float:
        """Mean seconds between tokens after the first; 0 with one token, infinite when it did not end."""
        if self.failed or self.first_token is None or self.last_token is None:
            return math.inf
        gaps = self.arrival.output_tokens - 1
        return (self.last_token - self.first_token) / gaps if gaps > 0 else 0.0


class Replica:
    """An engine in virtual time. Work is done lazily: advance() makes every step that ends by then.

    `on_end` is called with each request that ends, in the order of their ends within this replica.
    """

    def __init__(
        self, profile: Profile, now: float, on_end: Callable[["Replica", Served], None], *, skips: bool = True
    ) -> None:
        self.profile = profile
        self.scheduler = SkippingScheduler(profile.limits())
        self.clock = now
        """End of the last step that was made, or when work came to an idle engine."""
        self.num_steps = 0
        self._skips = skips
        self._on_end = on_end
        self._serving: dict[str, Served] = {}
        self._in_flight: tuple[SchedulerOutput, float] | None = None
        self._first_token = Observations(FIRST_TOKEN_BUCKETS)
        self._token_gap = Observations(TOKEN_GAP_BUCKETS)

    @property
    def num_serving(self) -> int:
        """Requests that run or wait."""
        return len(self._serving)

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the engine."""
        return len(self._serving) - self.scheduler.num_running

    def add(self, served: Served, now: float) -> bool:
        """A request arrives; False when it is refused."""
        self.advance(now)
        if self.num_waiting >= self.profile.max_queue:
            return False
        if not self.scheduler.has_work:
            self.clock = max(self.clock, now)
        elif self.clock < now:
            self._begin()  # this step was under way when the request came
        try:
            self.scheduler.add(
                str(served.number),
                prompt_of(served.number, served.arrival),
                SamplingParams(max_tokens=served.arrival.output_tokens, temperature=0.0),
                arrival_time=now,
            )
        except RequestRefused:
            return False
        self._serving[str(served.number)] = served
        return True

    def advance(self, now: float) -> None:
        """Make every step that ends by `now`."""
        while self.scheduler.has_work:
            if self._in_flight is None and (running := self.scheduler.decodes_alone()):
                if self.clock + self._decode_seconds(running) > now:
                    return  # gauges show the state at the end of the last step, so that this one need not be begun
                if self._skips and self._skip(running, now):
                    continue
            step = self._begin()
            if step is None:
                return
            output, seconds = step
            if self.clock + seconds > now:
                return
            self._finish(output, seconds)

    def fail(self, now: float) -> list[Served]:
        """The pod dies: everything it serves is lost."""
        lost = list(self._serving.values())
        for served in lost:
            self.scheduler.abort(str(served.number))
            served.failed, served.ended = True, now
        self._serving.clear()
        return lost

    def sample(self, now: float) -> Sample:
        """What /metrics shows at `now`."""
        counts = self.scheduler.counts()
        since = counts.oldest_waiting_since
        return Sample(
            time=now,
            blocks_used=counts.blocks_used,
            blocks_cached=counts.blocks_cached,
            blocks_total=counts.blocks_total,
            blocks_waiting=counts.blocks_waiting,
            running=counts.num_running,
            waiting=counts.num_waiting,
            oldest_waiting_seconds=0.0 if since is None else max(0.0, now - since),
            latencies=Latencies(self._first_token.snapshot(), self._token_gap.snapshot()),
        )

    def _decode_seconds(self, running: Sequence[Request]) -> float:
        """Of a step that gives each of these one token."""
        context = sum(request.num_computed + 1 for request in running)
        profile = self.profile
        return (
            profile.step_seconds + profile.decode_token_seconds * len(running) + profile.decode_pair_seconds * context
        )

    def _skip(self, running: list[Request], until: float) -> bool:
        """Decode steps that all end by `until`, at once; False when the next step must be made singly."""
        most = self.scheduler.most_decodes(running, MAX_SKIPPED_STEPS)
        if most < 2:
            return False
        rows, clock, count = len(running), self.clock, 0
        serving = [self._serving[request.request_id] for request in running]
        context = sum(request.num_computed + 1 for request in running)
        fixed = self.profile.step_seconds + self.profile.decode_token_seconds * rows
        per_pair, observe = self.profile.decode_pair_seconds, self._token_gap.observe
        while count < most:
            seconds = fixed + per_pair * context
            if clock + seconds > until:
                break
            if count == 0:
                for served in serving:
                    # As in _finish: one that sat out the step before waited longer for this token.
                    observe(seconds + (clock - (served.last_token or clock)))
            else:
                observe(seconds, rows)
            clock += seconds
            context += rows
            count += 1
        self.scheduler.decode(running, count, drawn_token)
        self.clock = clock
        self.num_steps += count
        for served in serving:
            served.last_token = clock
        return True

    def _begin(self) -> tuple[SchedulerOutput, float] | None:
        """The step in flight and its seconds, after beginning one if there was none; None when nothing is to do."""
        if self._in_flight is None:
            output = self.scheduler.schedule(self.clock)
            if output is not None:
                self._in_flight = (output, self._seconds(output))
        return self._in_flight

    def _seconds(self, output: SchedulerOutput) -> float:
        profile = self.profile
        decodes = output.scheduled[: output.num_decodes]
        seconds = profile.step_seconds + profile.decode_token_seconds * len(decodes)
        seconds += profile.decode_pair_seconds * sum(row.start + 1 for row in decodes)
        for row in output.scheduled[output.num_decodes :]:
            count = len(row.token_ids)
            pairs = count * row.start + count * (count + 1) // 2
            seconds += profile.prompt_token_seconds * count + profile.prompt_pair_seconds * pairs
        return seconds

    def _finish(self, output: SchedulerOutput, seconds: float) -> None:
        before, self.clock, self._in_flight = self.clock, self.clock + seconds, None
        self.num_steps += 1
        result = StepResult({row.request_id: drawn_token(row.request_id) for row in output.scheduled if row.sample})
        # Only steps with prompt chunks teach the engine's own step-time model, in both ways of making steps: its
        # prediction of decodes comes from the same coefficients.
        taught = seconds if output.num_decodes < len(output.scheduled) else None
        for news in self.scheduler.update(output, result, step_seconds=taught):
            served = self._serving.get(news.request_id)
            if served is None:
                continue
            if served.first_token is None:
                served.first_token, served.first_scheduled = self.clock, news.first_scheduled_time
                self._first_token.observe(self.clock - served.arrival.time)
            elif served.last_token is not None:
                # The step's own time, plus what the request sat out before it.
                self._token_gap.observe(seconds + (before - served.last_token))
            served.last_token = self.clock
            if news.finish_reason is not None:
                served.ended = self.clock
                del self._serving[news.request_id]
                self._on_end(self, served)


def drawn_token(request_id: str) -> int:
    """What a request always draws: its own, so that equal prompts part after their last token."""
    return FIRST_PRIVATE_TOKEN_ID + int(request_id)


def prompt_of(number: int, arrival: Arrival) -> list[int]:
    """Token ids: equal for equal shared pieces, else of this request alone."""
    tokens: list[int] = []
    for name in arrival.prefix:
        tokens += [name] * arrival.prefix_piece_tokens
    missing = arrival.prompt_tokens - len(tokens)
    return tokens + [FIRST_PRIVATE_TOKEN_ID + number] * missing if missing > 0 else tokens[: arrival.prompt_tokens]
