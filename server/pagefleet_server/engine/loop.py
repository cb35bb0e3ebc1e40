"""The step loop: read the inbox, schedule, execute, update, report. Synchronous, one thread."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pagefleet_server.core.report import NewTokens, SchedulerCounts
from pagefleet_server.core.scheduler import RequestRefused, Scheduler
from pagefleet_server.core.step import StepResult
from pagefleet_server.engine.channel import Channel
from pagefleet_server.engine.runner_protocol import Runner
from pagefleet_server.wire import (
    AbortRequests,
    AddRequests,
    Gauges,
    RequestOutput,
    ResetPrefixCache,
    StepDone,
    Stop,
    read_samplings,
)

_logger = logging.getLogger(__name__)

MAX_MESSAGES_PER_STEP = 64
"""So many messages are read between two steps; the rest waits in the socket."""
IDLE_REPORT_SECONDS = 1.0
"""An idle engine says so often that it lives."""


class StallGuard(Protocol):
    """Told when a step begins and when the engine is between steps."""

    def step_begins(self) -> None:
        """A step starts now."""

    def idle(self) -> None:
        """Nothing runs that could stall."""


@dataclass(slots=True)
class EngineLoop:
    """Everything that the loop uses is passed in."""

    channel: Channel
    scheduler: Scheduler
    runner: Runner
    clock: Callable[[], float]
    stall_guard: StallGuard

    def run(self) -> None:
        """Serve until a Stop message. Raises ChannelClosedError when the API is gone; any other exception is a failed
        step, after which the KV cache cannot be trusted."""
        next_report = self.clock()
        while True:
            messages = self.channel.receive(MAX_MESSAGES_PER_STEP)
            refused: list[RequestOutput] = []
            for message in messages:
                if isinstance(message, Stop):
                    return
                refused += self._take(message)
            if self.scheduler.has_work and not self.channel.is_congested:
                self._step(refused)
                next_report = self.clock() + IDLE_REPORT_SECONDS
                continue
            self.stall_guard.idle()
            now = self.clock()
            if messages or now >= next_report:
                self.channel.send(StepDone(gauges_of(self.scheduler.counts()), refused, now))
                next_report = now + IDLE_REPORT_SECONDS
                continue
            self.channel.flush()
            self.channel.wait(next_report - now)

    def _take(self, message: AddRequests | AbortRequests | ResetPrefixCache) -> list[RequestOutput]:
        match message:
            case AddRequests():
                try:
                    self.scheduler.add_group(
                        message.request_ids,
                        message.prompt_token_ids,
                        read_samplings(message.samplings),
                        arrival_time=message.arrival_time,
                        tenant=message.tenant,
                        cache_salt=message.cache_salt,
                        priority=message.priority,
                    )
                except RequestRefused as refusal:
                    return [
                        RequestOutput(request_id, [], finish_reason="error", error=str(refusal), is_refused=True)
                        for request_id in message.request_ids
                    ]
            case ResetPrefixCache():
                self.scheduler.reset_prefix_cache()
            case AbortRequests():
                for request_id in message.request_ids:
                    self.scheduler.abort(request_id)
        return []

    def _step(self, refused: list[RequestOutput]) -> None:
        self.stall_guard.step_begins()
        began = self.clock()
        output = self.scheduler.schedule(began)
        if output is None:
            raise RuntimeError("requests wait, no step is in flight, and the scheduler has nothing to do")
        result = self.runner.execute(output)
        ended = self.clock()
        if result.failed:
            self._judge(result)
        news = self.scheduler.update(output, result, step_seconds=ended - began)
        self.channel.send(
            StepDone(
                gauges=gauges_of(self.scheduler.counts()),
                outputs=refused + [output_of(new) for new in news],
                time=ended,
                step_seconds=ended - began,
                step_tokens=output.num_tokens,
                prefilling=[item.request_id for item in output.scheduled[output.num_decodes :] if not item.sample],
            )
        )

    def _judge(self, result: StepResult) -> None:
        """Requests failed: they alone, or everything?"""
        request_id, reason = next(iter(result.failed.items()))
        _logger.error("%d requests of a step failed; %s: %s", len(result.failed), request_id, reason)
        if not result.sampled:
            self.runner.check()


def output_of(new: NewTokens) -> RequestOutput:
    """The wire's form of one request's new tokens."""
    return RequestOutput(
        request_id=new.request_id,
        token_ids=new.token_ids,
        finish_reason=None if new.finish_reason is None else new.finish_reason.value,
        first_scheduled_time=new.first_scheduled_time,
        num_cached_tokens=new.num_cached_tokens,
        num_preemptions=new.num_preemptions,
        error=new.error,
        logprobs=new.logprobs,
        prompt_logprobs=new.prompt_logprobs,
        pooled=[] if new.pooled is None else [new.pooled],
        num_draft_tokens=new.num_draft_tokens,
        num_accepted_tokens=new.num_accepted_tokens,
    )


def gauges_of(counts: SchedulerCounts) -> Gauges:
    """The wire's form of the scheduler's counts."""
    return Gauges(
        num_running=counts.num_running,
        num_waiting=counts.num_waiting,
        blocks_free=counts.blocks_free,
        blocks_cached=counts.blocks_cached,
        blocks_used=counts.blocks_used,
        blocks_total=counts.blocks_total,
        blocks_waiting=counts.blocks_waiting,
        oldest_waiting_arrival=counts.oldest_waiting_since,
        num_added=counts.num_added,
        num_preemptions=counts.num_preemptions,
        prefix_queries_tokens=counts.prefix_queries_tokens,
        prefix_hits_tokens=counts.prefix_hits_tokens,
        num_drafts=counts.num_drafts,
        num_draft_tokens=counts.num_draft_tokens,
        num_accepted_by_place=list(counts.num_accepted_by_place),
    )
