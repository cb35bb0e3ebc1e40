"""What a step of A, B and D is made of, in milliseconds, against what the machine itself can do; or steps of several
ways to compute them, side by side.

    python -m benchmarks.serving.budget [--threads N] [--rounds N] [--json FILE] [--write docs/performance.md]
    python -m benchmarks.serving.budget --variants [NAME...] [--model PATH] [--dtype bfloat16] [--cpu-time]

floor: the weights read once at the measured bandwidth (decode), or the products at the measured rate (prefill).
linears, attention: the backend's own kernels on the model's shapes, layer after layer with their own weights, so that
they come from memory as in a step. step: the runner's whole step. The rest of it is norms, rotation, sampling and
Python, less what a step saves by keeping its threads awake from op to op: it may be negative. Each is the median of
rounds in turn. What a served step takes beyond that is scheduler, messages, HTTP and client.

Variants: whole steps, the best of rounds in turn, so that a busy machine hits all alike; only their ratios mean
something on another day.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.serving.floors import SMOLLM2, machine_rates, medians, step_seconds, times
from benchmarks.serving.machine import CoreMeter, facts
from benchmarks.serving.paths import quantised_gguf
from benchmarks.serving.report import between_marks
from pagefleet_kernels import ops
from pagefleet_kernels.batch import AttentionBatch, KVShape
from pagefleet_kernels.dispatch import select_backend
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import ScheduledRequest, SchedulerOutput
from pagefleet_server.runner.runner import Runner, build_runner
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings

CPU = torch.device("cpu")
BLOCK_SIZE = 16
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 30, 576, 1536, 9, 3, 64, 49152
"""SmolLM2-135M."""
SHAPES = [((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN), (HIDDEN, HEADS * HEAD), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
"""[out, in] of a layer's linears, merged as the decoder merges them."""
Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Work:
    """A step in the middle of a workload."""

    name: str
    num_sequences: int
    num_tokens: int
    """Of each."""
    start: int
    """Tokens of each that are in the cache already."""


WORKS = (
    Work("D: 1 sequence decodes at 128", 1, 1, 128),
    Work("A: 16 sequences decode at 128", 16, 1, 128),
    Work("B: 512 tokens of a prompt, from 0", 1, 512, 0),
    Work("B: 488 tokens of a prompt, from 512", 1, 488, 512),
)


STEPS = (
    Work("1 sequence decodes", 1, 1, 100),
    Work("4 sequences decode", 4, 1, 100),
    Work("8 sequences decode", 8, 1, 100),
    Work("16 sequences decode", 16, 1, 100),
    Work("32 sequences decode", 32, 1, 100),
    Work("64 sequences decode", 64, 1, 100),
    Work("64 tokens of a prompt", 1, 64, 0),
    Work("128 tokens of a prompt", 1, 128, 0),
    Work("512 tokens of a prompt", 1, 512, 0),
)
VARIANTS: dict[str, dict[str, str]] = {
    "plain torch": {"executor": "transformers", "attention_backend": "reference"},
    "transformers path": {"executor": "transformers"},
    "fused decoder": {"executor": "fused"},
    "own scales": {"executor": "fused", "quantization": "gguf"},
}
"""Column -> settings of the model."""


def linears(rows: int, logit_rows: int) -> Run:
    """All linears of one step, each with weights of its own."""
    backend = select_backend(CPU)

    def packed(shape: tuple[int, int], out: torch.dtype | None = None) -> Run:
        weight = torch.randn(shape).bfloat16()
        function = ops.pack_linear(backend, weight, None, out_dtype=out)
        x = torch.randn(logit_rows if out else rows, shape[1]).bfloat16()
        if function is None:
            return lambda: torch.nn.functional.linear(x, weight)
        return lambda: function(x)

    calls = [packed(shape) for _ in range(LAYERS) for shape in SHAPES] + [packed((VOCABULARY, HIDDEN), torch.float32)]

    def run() -> None:
        with torch.inference_mode():
            for call in calls:
                call()

    return run


def attention(work: Work) -> Run:
    """Attention of all layers; each has a cache of its own."""
    backend = select_backend(CPU)
    length = work.start + work.num_tokens
    blocks = -(-length // BLOCK_SIZE)
    tables = torch.arange(1, 1 + work.num_sequences * blocks, dtype=torch.int32).reshape(work.num_sequences, blocks)
    rows = work.num_sequences * work.num_tokens
    batch = AttentionBatch(
        query_starts=torch.arange(0, rows + 1, work.num_tokens, dtype=torch.int32),
        seq_lens=torch.full((work.num_sequences,), length, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.arange(BLOCK_SIZE, BLOCK_SIZE + rows),
        num_decodes=work.num_sequences if work.num_tokens == 1 else 0,
        max_query_len=work.num_tokens,
        max_seq_len=length,
    )
    shape = KVShape(KV_HEADS, HEAD, HEAD)
    caches = [
        ops.allocate(
            backend,
            shape,
            num_blocks=1 + work.num_sequences * blocks,
            block_size=BLOCK_SIZE,
            dtype=torch.bfloat16,
            device=CPU,
        )
        for _ in range(LAYERS)
    ]
    query = torch.randn(rows, HEADS, HEAD).bfloat16()

    def run() -> None:
        with torch.inference_mode():
            for cache in caches:
                ops.paged_attention(backend, query, cache, batch, scale=HEAD**-0.5, check_bounds=False)

    return run


def whole_step(runner: Runner, work: Work) -> Run:
    """The runner's own step."""
    blocks = -(-(work.start + work.num_tokens) // BLOCK_SIZE)
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    scheduled = tuple(
        ScheduledRequest(
            request_id=str(index),
            token_ids=tuple(range(100 + index, 100 + index + work.num_tokens)),
            start=work.start,
            block_ids=tuple(range(1 + index * blocks, 1 + (index + 1) * blocks)),
            sample=True,
            sampling=greedy,
        )
        for index in range(work.num_sequences)
    )
    decodes = work.num_sequences if work.num_tokens == 1 else 0
    step = SchedulerOutput(scheduled, decodes, work.num_sequences * work.num_tokens)
    return lambda: runner.execute(step)


def make_runner(options: argparse.Namespace, **of_model: str) -> Runner:
    """Loaded, with room for the largest of STEPS."""
    model = replace(
        ModelSettings(model=options.model or str(quantised_gguf()), dtype=options.dtype, device="cpu"),
        threads=options.threads,
        **of_model,
    )
    settings = EngineSettings(
        model=model,
        cache=CacheSettings(num_kv_blocks=512, block_size=BLOCK_SIZE),
        scheduler=SchedulerSettings(max_num_seqs=64, max_num_batched_tokens=512),
    )
    return build_runner(settings, lambda *_, **__: None)


def compare(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Print the variants' steps; milliseconds by step and variant."""
    names = options.variants or list(VARIANTS)[:3]
    runners = {name: make_runner(options, **VARIANTS[name]) for name in names}
    clock = time.thread_time if options.cpu_time else time.perf_counter
    print("| step, ms | " + " | ".join(names) + " | first / last |\n|" + "---|" * (len(names) + 2))
    table = {}
    for work in STEPS:
        taken = times({name: whole_step(runner, work) for name, runner in runners.items()}, options.rounds, clock)
        table[work.name] = best = {name: min(values) for name, values in taken.items()}
        cells = " | ".join(f"{best[name]:.2f}" for name in names)
        print(f"| {work.name} | {cells} | {best[names[0]] / best[names[-1]]:.2f} |", flush=True)
    return table


def main() -> None:
    """Print the table; --json writes it too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="the table into that page, between its marks")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, help="compare these (default: all but the last)")
    parser.add_argument("--model", help="of the variants: directory or .gguf file; default: SmolLM2-135M's")
    parser.add_argument("--dtype", default="bfloat16", help="of the variants")
    parser.add_argument("--cpu-time", action="store_true", help="of this thread: for --threads 1 on a busy machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    meter = CoreMeter(0)
    if options.variants is not None:
        print(" · ".join(f"{key} {value}" for key, value in facts().items()) + f" · {options.threads} threads\n")
        steps = compare(options)
        others = max(0.0, meter.read()[0])
        print(f"\nOthers took {others:.2f} cores in the mean.")
        if options.json:
            found_facts = facts() | {"threads": options.threads, "cpu_time": options.cpu_time, "dtype": options.dtype}
            options.json.write_text(json.dumps(found_facts | {"other_cores": others, "ms": steps}, indent=1) + "\n")
        return
    runner = make_runner(options)
    rates = machine_rates(options.rounds)
    bandwidth, rate = rates.bytes_per_s / 1e9, rates.flops_per_s / 1e9
    lines = [" · ".join(f"{key} {value}" for key, value in facts().items()) + f" · {options.threads} threads"]
    lines += [f"reading memory {bandwidth:.1f} GB/s · bfloat16 product {rate:.0f} GFLOP/s", ""]
    lines += ["| step, ms | floor | linears | attention | whole step | rest of it |", "|---|---|---|---|---|---|"]
    table = {}
    for work in WORKS:
        rows = work.num_sequences * work.num_tokens
        found = medians(
            {
                "linears": linears(rows, work.num_sequences),
                "attention": attention(work),
                "step": whole_step(runner, work),
            },
            options.rounds,
        )
        found["floor"] = 1e3 * step_seconds(SMOLLM2, rows, work.num_sequences, rates)
        table[work.name] = found
        rest = found["step"] - found["linears"] - found["attention"]
        cells = (found["floor"], found["linears"], found["attention"], found["step"], rest)
        lines.append(f"| {work.name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    others = max(0.0, meter.read()[0])
    lines += ["", f"Others took {others:.2f} cores in the mean."]
    print("\n".join(lines))
    if options.write:
        options.write.write_text(between_marks(options.write.read_text(), "budget", "\n".join(lines)))
    if options.json:
        found_facts = facts() | {"threads": options.threads, "gb_per_s": bandwidth, "gflop_per_s": rate}
        options.json.write_text(json.dumps(found_facts | {"other_cores": others, "ms": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
