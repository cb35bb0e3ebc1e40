"""Runs the choices of one HTTP request through the engine and folds their tokens into text."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from pagefleet_server.api.errors import ApiError, DeadlineError
from pagefleet_server.api.output_text import Delta, OutputText, TextRules
from pagefleet_server.api.service import Service
from pagefleet_server.api.text_model import TextModel
from pagefleet_server.api.tracker import OnEnd
from pagefleet_server.client.errors import EngineError
from pagefleet_server.client.request_stream import RequestStream
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import TokenLogprobs
from pagefleet_server.wire import RequestOutput


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One output that is to be made."""

    index: int
    """In the answer's `choices`."""
    prompt_index: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    rules: TextRules
    skip_special_tokens: bool = True
    prompt_text: str | None = None
    """Given when the prompt is echoed."""


@dataclass(frozen=True, slots=True)
class Terms:
    """On which one HTTP request's choices are run."""

    arrival: float
    """Clock seconds."""
    timeout_seconds: float | None = None
    """From arrival; None: no deadline."""
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    on_end: OnEnd | None = None
    """Told of every choice that has ended."""
    on_sent: Callable[[int], None] = lambda _: None
    """Told how many choices have gone to the engine, some at a time."""

    def overdue(self) -> DeadlineError:
        """What a request is told whose time is over."""
        return DeadlineError(f"the answer was not complete after {self.timeout_seconds:g} s")

    @asynccontextmanager
    async def in_time(self, now: float) -> AsyncIterator[None]:
        """Template, tokenizer and grammar have the same deadline as the answer. Raises DeadlineError."""
        try:
            async with asyncio.timeout(
                None if self.timeout_seconds is None else self.arrival + self.timeout_seconds - now
            ):
                yield
        except TimeoutError as error:
            raise self.overdue() from error


@dataclass(slots=True)
class Choice:
    """One output that is being made."""

    plan: ChoicePlan
    stream: RequestStream
    output: OutputText
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from the second on, when asked for; all are there before the first delta."""
    pooled: list[bytes] = field(default_factory=list)
    """Parts of the prompt's pooled hidden state, for an embedding."""
    last: Delta | None = None
    """The delta with the finish reason."""

    @property
    def prompt_told(self) -> list[tuple[int, TokenLogprobs | None]]:
        """The prompt's tokens, each with its log-probabilities; the first has none."""
        return list(zip(self.plan.prompt_token_ids, [None, *self.prompt_logprobs], strict=True))


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one HTTP request; a prompt counts once however many outputs it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    draft_tokens: int = 0
    """Guessed by the server (--speculative-tokens)."""
    accepted_tokens: int = 0
    """Of these, right ones."""

    def to_dict(self) -> dict[str, object]:
        """OpenAI's shape; what became of guesses only where there were some."""
        guesses = {
            "accepted_prediction_tokens": self.accepted_tokens,
            "rejected_prediction_tokens": self.draft_tokens - self.accepted_tokens,
        }
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        } | ({"completion_tokens_details": guesses} if self.draft_tokens else {})


async def end_all(tasks: "list[asyncio.Task[None]]") -> None:
    """Cancel them and wait. The list is empty afterwards: cut off while they told of an error, they hold it."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()


TOKENS_AT_ONCE = 64
"""Tokens that came while the consumer was busy are handed out so many at a time: with log-probabilities each may cost
a tenth of a millisecond to write."""


def cut_output(output: RequestOutput) -> Iterator[tuple[Sequence[int], str | None, Sequence[TokenLogprobs]]]:
    """Token ids, finish reason and log-probabilities, the reason with the last ones; at least once."""
    ids, logprobs = output.token_ids, output.logprobs or ()
    for start in range(0, max(1, len(ids)), TOKENS_AT_ONCE):
        end = start + TOKENS_AT_ONCE
        yield ids[start:end], output.finish_reason if end >= len(ids) else None, logprobs[start:end]


def batched(plans: Sequence[ChoicePlan], size: int) -> Iterator[Sequence[ChoicePlan]]:
    """In order, at most `size` together."""
    for start in range(0, len(plans), size):
        yield plans[start : start + size]


Arrivals = asyncio.Queue[tuple[Choice, Delta | ApiError]]


class Generation:
    """`async with Generation(...) as generation: async for choice, delta in generation.deltas(): ...`

    Leaving the block aborts what has not ended: a client that goes away cancels its handler.
    """

    def __init__(self, service: Service, text: TextModel, plans: Sequence[ChoicePlan], terms: Terms) -> None:
        self._service = service
        self._text = text
        self._plans = plans
        self._terms = terms
        self._timers: list[asyncio.TimerHandle] = []
        self._expired: ApiError | None = None
        self._reason = "abort"
        self.choices: list[Choice] = []

    async def __aenter__(self) -> Self:
        """Send everything to the engine. Raises UnavailableError, BadRequestError."""
        prompts = {plan.prompt_index: len(plan.prompt_token_ids) for plan in self._plans}
        self._service.check_queued_tokens(sum(prompts.values()))
        try:
            for _, plans in itertools.groupby(self._plans, key=lambda plan: plan.prompt_index):
                for group in batched(list(plans), self._service.settings.engine.scheduler.max_num_seqs):
                    self._submit(group)
                    self._terms.on_sent(len(group))
                    if len(prompts) > 1:
                        await asyncio.sleep(0)
        except EngineError as error:
            self._close()
            raise self._service.explain(error) from error
        except asyncio.CancelledError:
            self._close()
            raise
        queue_timeout = self._service.settings.http.queue_timeout_seconds
        if queue_timeout:
            self._call_at(self._terms.arrival + queue_timeout, self._leave_queue)
        if self._terms.timeout_seconds is not None:
            self._call_at(self._terms.arrival + self._terms.timeout_seconds, self._expire)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    @property
    def usage(self) -> Usage:
        """So far."""
        prompts = {choice.plan.prompt_index: choice for choice in reversed(self.choices)}
        return Usage(
            prompt_tokens=sum(len(choice.plan.prompt_token_ids) for choice in prompts.values()),
            completion_tokens=sum(choice.output.num_tokens for choice in self.choices),
            cached_tokens=sum(choice.num_cached_tokens for choice in prompts.values()),
            draft_tokens=sum(choice.num_draft_tokens for choice in self.choices),
            accepted_tokens=sum(choice.num_accepted_tokens for choice in self.choices),
        )

    async def deltas(self) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """What each choice brings, as it comes, until all have ended. Raises UnavailableError. Close it with aclosing:
        a consumer that is slow holds back nothing but itself, tokens are merged meanwhile."""
        if len(self.choices) == 1:
            async with aclosing(self._follow(self.choices[0])) as deltas:
                async for delta in deltas:
                    yield self.choices[0], delta
            return
        queue: Arrivals = asyncio.Queue(maxsize=1)
        tasks = [asyncio.create_task(self._follow_into(choice, queue)) for choice in self.choices]
        num_open = len(tasks)
        try:
            while num_open:
                choice, arrived = await queue.get()
                if isinstance(arrived, ApiError):
                    try:
                        raise arrived
                    finally:
                        del arrived  # its traceback holds this frame; so with what is left in the queue
                num_open -= arrived.finish_reason is not None
                yield choice, arrived
        finally:
            await end_all(tasks)
            while not queue.empty():
                queue.get_nowait()

    def _submit(self, plans: Sequence[ChoicePlan]) -> None:
        """Choices of one prompt: the engine computes it once."""
        service, prompt = self._service, plans[0].prompt_token_ids
        streams = service.client.submit_group(
            prompt,
            [plan.sampling for plan in plans],
            tenant=self._terms.tenant,
            cache_salt=self._terms.cache_salt,
            priority=self._terms.priority,
        )
        num_blocks = -(-len(prompt) // service.settings.engine.cache.block_size)
        service.tracker.sent(
            [(stream.request_id, plan.sampling.max_tokens) for plan, stream in zip(plans, streams, strict=True)],
            arrival=self._terms.arrival,
            num_prompt=len(prompt),
            num_blocks=num_blocks,
            on_end=self._terms.on_end,
        )
        for plan, stream in zip(plans, streams, strict=True):
            service.open_streams[stream.request_id] = stream
            detokenizer = self._text.detokenizer(prompt, skip_special_tokens=plan.skip_special_tokens)
            self.choices.append(Choice(plan, stream, OutputText(detokenizer, plan.rules)))

    async def _follow(self, choice: Choice) -> AsyncGenerator[Delta, None]:
        try:
            async for output in choice.stream:
                choice.prompt_logprobs.extend(output.prompt_logprobs or ())
                choice.pooled.extend(output.pooled)
                if not output.token_ids and output.finish_reason is None:
                    continue
                choice.num_cached_tokens = max(choice.num_cached_tokens, output.num_cached_tokens)
                choice.num_draft_tokens, choice.num_accepted_tokens = (
                    output.num_draft_tokens,
                    output.num_accepted_tokens,
                )
                for piece in cut_output(output):
                    delta = choice.output.feed(*piece)
                    choice.text.append(delta.text)
                    choice.token_ids.extend(delta.token_ids)
                    if delta.finish_reason is not None:
                        choice.last = delta
                        self._end(choice, delta.finish_reason)
                    yield delta
                    if delta.finish_reason is not None:
                        return
                    if len(output.token_ids) > TOKENS_AT_ONCE:
                        await asyncio.sleep(0)
            raise self._expired or EngineError("the request was ended by the server")
        except EngineError as error:
            self._reason = "error"
            raise self._service.explain(error) from error
        except asyncio.CancelledError:
            # The stream has told the engine; the rest has time: a gateway that goes takes hundreds of clients along in
            # one instant.
            await self._service.turns.wait()
            raise

    async def _follow_into(self, choice: Choice, queue: "Arrivals") -> None:
        try:
            async with aclosing(self._follow(choice)) as deltas:
                async for delta in deltas:
                    await queue.put((choice, delta))
        except ApiError as error:
            await queue.put((choice, error))

    def _end(self, choice: Choice, reason: str) -> None:
        """The engine forgets it (if it has not ended it itself) and the metrics learn why; once."""
        choice.stream.close()
        self._service.open_streams.pop(choice.stream.request_id, None)
        self._service.tracker.ended(choice.stream.request_id, reason)

    def _call_at(self, when: float, callback: Callable[[], None]) -> None:
        left = max(0.0, when - self._service.clock())
        self._timers.append(asyncio.get_running_loop().call_later(left, callback))

    def _expire(self) -> None:
        """The deadline is over."""
        self._give_up(self._terms.overdue())

    def _leave_queue(self) -> None:
        """It has waited long enough, if it still waits."""
        tracker = self._service.tracker
        if not any(choice.last or tracker.has_begun(choice.stream.request_id) for choice in self.choices):
            self._give_up(self._service.refuse_after_wait())

    def _give_up(self, error: ApiError) -> None:
        """The engine forgets what is not done, and whoever follows gets the error."""
        self._expired = error
        for choice in self.choices:
            if choice.last is None:
                choice.stream.close()

    def _close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for choice in self.choices:
            if choice.last is None:
                self._end(choice, self._reason)
        self._expired = None  # its traceback holds a frame that holds this object
