"""Host work of one engine step beyond the model: plan, lay out, take in, report. Goal: under 2 ms at 64 running.

python benchmarks/engine_host_work.py [--running 64] [--context 512] [--steps 2000]
"""

import argparse
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from pagefleet_server.core.limits import SchedulerLimits
from pagefleet_server.core.report import NewTokens
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.scheduler import Scheduler
from pagefleet_server.core.step import SchedulerOutput, StepResult
from pagefleet_server.engine.loop import gauges_of, output_of
from pagefleet_server.frames import encode_frame
from pagefleet_server.runner.flat_batch import flatten
from pagefleet_server.wire import StepDone

BLOCK_SIZE = 16
NUM_WAITING = 64
T = TypeVar("T")


def build(num_running: int, context: int, steps: int) -> Scheduler:
    """A scheduler with so many requests in the middle of decoding, and as many that wait."""
    longest = context + steps + 64
    num_blocks = num_running * -(-longest // BLOCK_SIZE) + 64
    scheduler = Scheduler(
        SchedulerLimits(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=longest,
            max_num_seqs=num_running,
            max_num_batched_tokens=max(4096, num_running),
        )
    )
    for index in range(num_running + NUM_WAITING):
        prompt = [(index * 7919 + position) % 50000 for position in range(context)]
        scheduler.add(str(index), prompt, SamplingParams(max_tokens=longest - context), arrival_time=0.0)
    while True:
        output = scheduler.schedule(0.0)
        assert output is not None
        scheduler.update(output, draw(output))
        if output.num_decodes == num_running:
            return scheduler


def draw(output: SchedulerOutput) -> StepResult:
    """A token for everyone, without a model."""
    return StepResult({row.request_id: 1 for row in output.scheduled if row.sample})


def report(scheduler: Scheduler, news: list[NewTokens]) -> bytes:
    """The message that the loop sends."""
    return encode_frame(StepDone(gauges_of(scheduler.counts()), [output_of(new) for new in news], 0.0, 0.01, len(news)))


def measure(num_running: int, context: int, steps: int) -> dict[str, list[float]]:
    """Phase -> seconds of each step."""
    scheduler = build(num_running, context, steps)
    device = torch.device("cpu")
    seconds: dict[str, list[float]] = {}

    def timed(phase: str, work: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = work()
        seconds.setdefault(phase, []).append(time.perf_counter() - began)
        return result

    for _ in range(steps):
        output = timed("schedule", lambda: scheduler.schedule(0.0))
        assert output is not None and output.num_decodes == num_running
        timed("lay out", partial(flatten, output, block_size=BLOCK_SIZE, device=device))
        news = timed("update", partial(scheduler.update, output, draw(output), 0.0, step_seconds=0.01))
        timed("report", partial(report, scheduler, news))
    seconds["total"] = [sum(parts) for parts in zip(*seconds.values(), strict=True)]
    return seconds


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds = measure(options.running, options.context, options.steps)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"commit {commit.stdout.strip()}, {platform.machine()}, Python {platform.python_version()}")
    print(f"{options.running} running at {options.context} tokens of context, {NUM_WAITING} waiting")
    print(f"{'phase':10} {'median ms':>10} {'p99 ms':>8}")
    for phase, values in seconds.items():
        p99 = statistics.quantiles(values, n=100)[98]
        print(f"{phase:10} {statistics.median(values) * 1e3:10.3f} {p99 * 1e3:8.3f}")


if __name__ == "__main__":
    main()
