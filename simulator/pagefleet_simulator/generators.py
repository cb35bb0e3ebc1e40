"""Made-up load: a rate over time, Poisson arrivals and log-normal lengths, all from one seed."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from pagefleet_simulator.workload import MAX_REQUESTS, Arrival, Workload

Rate = Callable[[float], float]
"""Seconds since the start -> requests a second."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal token counts; the defaults are near those of the Azure conversation trace."""

    prompt_median: float = 900.0
    prompt_sigma: float = 0.8
    output_median: float = 150.0
    output_sigma: float = 0.9
    max_prompt: int = 6000
    max_output: int = 1000

    def draw(self, random_: random.Random) -> tuple[int, int]:
        """(prompt tokens, output tokens)."""
        prompt = random_.lognormvariate(math.log(self.prompt_median), self.prompt_sigma)
        output = random_.lognormvariate(math.log(self.output_median), self.output_sigma)
        return max(1, min(self.max_prompt, round(prompt))), max(1, min(self.max_output, round(output)))


def steady(rate: float) -> Rate:
    """Always the same."""
    return lambda _: rate


def ramp(start: float, end: float, seconds: float) -> Rate:
    """From one rate to another in a straight line, then constant."""
    return lambda now: start + (end - start) * min(1.0, now / seconds)


def step(low: float, high: float, at: float) -> Rate:
    """One jump that stays."""
    return lambda now: high if now >= at else low


def spike(low: float, high: float, at: float, seconds: float) -> Rate:
    """High for a while, low before and after."""
    return lambda now: high if at <= now < at + seconds else low


def diurnal(low: float, high: float, period: float) -> Rate:
    """A day as a sine; it starts at the low point."""
    return lambda now: low + (high - low) * (1 - math.cos(2 * math.pi * now / period)) / 2


def on_off(low: float, high: float, on: float, off: float) -> Rate:
    """High and low by turns; begins low."""
    return lambda now: low if now % (on + off) < off else high


def then(first: Rate, seconds: float, second: Rate) -> Rate:
    """One rate for so long, then another whose time begins there."""
    return lambda now: first(now) if now < seconds else second(now - seconds)


def generate(name: str, rate: Rate, seconds: float, *, seed: int, lengths: Lengths | None = None) -> Workload:
    """Poisson arrivals by thinning (Lewis and Shedler, 1979)."""
    lengths = lengths or Lengths()
    random_ = random.Random(seed)
    rates = [rate(seconds * index / 4096) for index in range(4097)]
    lowest, highest = min(rates), max(rates)
    if not 0 < highest < math.inf:
        raise ValueError(f"the highest rate of {name} is {highest} requests a second: it must be above 0 and finite")
    if not lowest >= 0:
        raise ValueError(f"the lowest rate of {name} is {lowest} requests a second: it must not be below 0")
    if highest * seconds > MAX_REQUESTS:
        raise ValueError(f"{highest:g} requests a second for {seconds:g} s may be more than {MAX_REQUESTS} requests")
    arrivals: list[Arrival] = []
    now = random_.expovariate(highest)
    while now < seconds:
        if random_.random() * highest < rate(now):
            arrivals.append(Arrival(now, *lengths.draw(random_)))
        now += random_.expovariate(highest)
    return Workload(name, tuple(arrivals), seconds)
