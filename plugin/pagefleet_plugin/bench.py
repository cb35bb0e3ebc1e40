"""A short load test: some streams at once, and what their users would have seen. `summarise` is pure."""

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from pagefleet_plugin.completions import new_session, stream_chat
from pagefleet_plugin.errors import PluginError

REQUEST_SECONDS = 300.0
PROMPT = "Write a long story about a lighthouse keeper and the sea. Part {number}."


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request."""

    first_seconds: float | None
    """From sending to the first token; None when it failed."""
    gaps: tuple[float, ...]
    """Seconds between pieces that carried one token each."""
    tokens: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """All of them."""

    requests: int
    failed: int
    seconds: float
    tokens_per_second: float
    first_token_ms: dict[str, float]
    """Percentile → milliseconds, over the requests that did not fail."""
    inter_token_ms: dict[str, float]
    errors: tuple[str, ...]
    """The first three kinds."""


def summarise(outcomes: Sequence[Outcome], seconds: float) -> Summary:
    """The figures of a run of `seconds`."""
    errors = tuple(dict.fromkeys(found.error for found in outcomes if found.error))
    return Summary(
        requests=len(outcomes),
        failed=sum(found.error is not None for found in outcomes),
        seconds=round(seconds, 2),
        tokens_per_second=round(sum(found.tokens for found in outcomes) / seconds, 1) if seconds > 0 else 0.0,
        first_token_ms=_percentiles([found.first_seconds for found in outcomes if found.first_seconds is not None]),
        inter_token_ms=_percentiles([gap for found in outcomes for gap in found.gaps]),
        errors=errors[:3],
    )


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    if len(seconds) == 1:
        return {name: round(seconds[0] * 1000, 1) for name in ("p50", "p95", "p99")}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{share}": round(cuts[share - 1] * 1000, 1) for share in (50, 95, 99)}


async def bench(
    url: str,
    *,
    requests: int,
    concurrency: int,
    max_tokens: int,
    headers: Mapping[str, str],
    extra: Mapping[str, Any],
    done: Callable[[], object],
) -> Summary:
    """`requests` streams, `concurrency` at a time, of exactly `max_tokens` each; calls `done` after each."""
    numbers = itertools.count()
    outcomes: list[Outcome] = []
    body = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0} | dict(extra)

    async def client(session: aiohttp.ClientSession) -> None:
        while (number := next(numbers)) < requests:
            outcomes.append(await _measure(session, url, number, headers, body))
            done()

    started = time.monotonic()
    async with new_session(REQUEST_SECONDS) as session, asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, requests)):
            group.create_task(client(session))
    return summarise(outcomes, time.monotonic() - started)


async def _measure(
    session: aiohttp.ClientSession, url: str, number: int, headers: Mapping[str, str], body: Mapping[str, Any]
) -> Outcome:
    sent = time.monotonic()
    first: float | None = None
    previous: tuple[float, int] | None = None
    gaps: list[float] = []
    tokens = 0
    try:
        messages = [{"role": "user", "content": PROMPT.format(number=number)}]
        async for piece in stream_chat(session, url, messages, headers=headers, extra=body):
            tokens = piece.tokens if piece.tokens is not None else tokens + 1
            first = first if first is not None else piece.seconds - sent
            if previous is not None and tokens > previous[1]:
                # Tokens that came in one piece came at once.
                gaps.append(piece.seconds - previous[0])
                gaps.extend([0.0] * (tokens - previous[1] - 1))
            previous = (piece.seconds, tokens)
    except PluginError as error:
        return Outcome(None, (), tokens, str(error))
    return Outcome(first, tuple(gaps), tokens)
