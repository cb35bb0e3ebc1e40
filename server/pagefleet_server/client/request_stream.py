"""The outputs of one request, as an async iterator that cannot grow without bound."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from pagefleet_server.client.errors import EngineError
from pagefleet_server.core.step import TokenLogprobs
from pagefleet_server.wire import RequestOutput


class RequestStream:
    """Iterate for RequestOutput; the last one has a finish_reason.

    Use as `with client.submit(...) as stream: async for output in stream: ...`. Leaving the block, cancelling the
    iteration or close() before the end aborts the request in the engine. One consumer at a time.
    Outputs that arrive while the consumer is busy are merged, so at most max_tokens token ids are ever held.
    """

    def __init__(self, request_id: str, on_abandoned: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._on_abandoned = on_abandoned
        self._pending: RequestOutput | None = None
        self._error: EngineError | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the consumer, while it has nothing to do
        self._ended = False  # the last output or the error has been put in, or close() was called

    def put(self, output: RequestOutput) -> None:
        """Called by the client for each message; ignored after the end."""
        if self._ended:
            return
        self._pending = output if self._pending is None else merge_outputs(self._pending, output)
        self._ended = output.finish_reason is not None
        self._wake()

    def fail(self, error: EngineError) -> None:
        """Called by the client: what was received is still delivered, then the error is raised."""
        if self._ended:
            return
        self._error = error
        self._ended = True
        self._wake()

    def close(self) -> None:
        """Abort unless it has ended. Idempotent; iteration stops."""
        if not self._ended:
            self._ended = True
            self._on_abandoned(self.request_id)
        self._pending = None
        self._error = None
        self._wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        while self._pending is None and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.close()
                raise
        if self._pending is not None:
            output, self._pending = self._pending, None
            return output
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        raise StopAsyncIteration

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge_outputs(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Both as one: tokens, logprobs and pooled parts in order, the end of the second, the first known
    first_scheduled_time."""
    scheduled = first.first_scheduled_time
    return msgspec.structs.replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        logprobs=_joined(first.logprobs, second.logprobs),
        prompt_logprobs=_joined(first.prompt_logprobs, second.prompt_logprobs),
        pooled=first.pooled + second.pooled,
        first_scheduled_time=second.first_scheduled_time if scheduled is None else scheduled,
    )


def _joined(first: list[TokenLogprobs] | None, second: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second
