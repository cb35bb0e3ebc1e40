"""Requests over time: what a trace or a generator gives to the simulation."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

MAX_REQUESTS = 2_000_000
"""Requests of one load, at most: some gigabyte of them."""
MAX_SECONDS = 366 * 86400.0
"""Length of a load, at most: every two seconds of it are decided."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    time: float
    """Seconds since the trace's start."""
    prompt_tokens: int
    """>= 1."""
    output_tokens: int
    """>= 1; the request ends after exactly so many."""
    prefix: tuple[int, ...] = ()
    """Names of the prompt's leading pieces, in order: equal names are equal content, for the prefix cache."""
    prefix_piece_tokens: int = 512
    """Tokens of one piece."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A named, ordered list of requests."""

    name: str
    arrivals: tuple[Arrival, ...]
    """By time."""
    seconds: float
    """Length of the trace; the fleet's cost is counted over it."""

    def slice(self, start: float, end: float) -> "Workload":
        """The part [start, end), with times from 0 on."""
        inside = tuple(
            replace(arrival, time=arrival.time - start) for arrival in self.arrivals if start <= arrival.time < end
        )
        return Workload(f"{self.name}[{start:g}:{end:g}]", inside, min(end, self.seconds) - start)

    def at_rate(self, factor: float) -> "Workload":
        """The same requests, arriving `factor` times as fast."""
        if not factor > 0:
            raise ValueError(f"a trace cannot be replayed {factor} times as fast: give a number above 0")
        if factor == 1:
            return self
        if math.isinf(factor) or self.seconds / factor > MAX_SECONDS:
            raise ValueError(f"{self.seconds:g} s of load, {factor:g} times as fast: more than no time, at most a year")
        faster = tuple(replace(arrival, time=arrival.time / factor) for arrival in self.arrivals)
        return Workload(f"{self.name} x{factor:g}", faster, self.seconds / factor)

    def within(self, max_tokens: int) -> "Workload":
        """Requests cut to what a server of this context length would take: prompts first, then outputs."""
        cut = []
        for arrival in self.arrivals:
            output = min(arrival.output_tokens, max(1, max_tokens // 2))
            prompt = min(arrival.prompt_tokens, max_tokens - output)
            cut.append(replace(arrival, prompt_tokens=prompt, output_tokens=output))
        return Workload(self.name, tuple(cut), self.seconds)


def ordered(name: str, arrivals: Iterable[Arrival], seconds: float | None = None) -> Workload:
    """A workload of arrivals in any order; its length is that of the last one unless given."""
    items: Sequence[Arrival] = sorted(arrivals, key=lambda arrival: arrival.time)
    end = items[-1].time if items else 0.0
    return Workload(name, tuple(items), end if seconds is None else seconds)
