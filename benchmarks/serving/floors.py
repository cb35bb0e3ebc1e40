"""What a machine allows at most: weights read once a step, products at the rate of its own matrix product. Pure but for
the two rates, which are measured. Attention, norms and everything else count as free, so no server reaches it."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.serving.workloads import Workload


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Of its linears, bfloat16."""

    num_layer_weights: int
    """Of all layers: every token passes them."""
    num_output_weights: int
    """Of the output layer: only tokens that are drawn pass it."""

    @property
    def num_weights(self) -> int:
        """What a step reads."""
        return self.num_layer_weights + self.num_output_weights


def llama_size(*, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, head: int, vocab: int) -> ModelSize:
    """Of a model with Llama's shape."""
    attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    return ModelSize(layers * (attention + 3 * hidden * inner), vocab * hidden)


SMOLLM2 = llama_size(layers=30, hidden=576, inner=1536, heads=9, kv_heads=3, head=64, vocab=49152)
ONE_BILLION = llama_size(layers=16, hidden=2048, inner=8192, heads=32, kv_heads=8, head=64, vocab=49152)
"""What benchmarks/serving/export_model.py --random-1b writes."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Of the whole machine."""

    bytes_per_s: float
    """Reading memory."""
    flops_per_s: float
    """torch's product of two bfloat16 matrices of 1024 x 1024."""


def medians(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each, in turn, after one round that warms up."""
    return {name: statistics.median(values) for name, values in times(runs, rounds).items()}


def times(
    runs: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Milliseconds of each round, likewise."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            began = clock()
            run()
            found[name].append((clock() - began) * 1e3)
    return {name: values[1:] for name, values in found.items()}


def machine_rates(rounds: int) -> Rates:
    """Reading 512 MiB; the product. All of torch's threads; the best round, since neighbours only ever slow it down."""
    data = torch.ones(1 << 26, dtype=torch.int64)
    left, right = torch.randn(1024, 1024).bfloat16(), torch.randn(1024, 1024).bfloat16()
    with torch.inference_mode():
        taken = times({"read": data.sum, "product": lambda: [left @ right for _ in range(8)]}, rounds)
    found = {name: min(values) for name, values in taken.items()}
    return Rates(data.nbytes / found["read"] * 1e3, 8 * 2 * 1024**3 / found["product"] * 1e3)


def step_seconds(size: ModelSize, num_rows: int, num_drawn: int, rates: Rates) -> float:
    """One step of so many tokens, of which so many are drawn from."""
    flops = 2 * (size.num_layer_weights * num_rows + size.num_output_weights * num_drawn)
    return max(2 * size.num_weights / rates.bytes_per_s, flops / rates.flops_per_s)


def floor_seconds(workload: Workload, size: ModelSize, rates: Rates) -> float:
    """Prompts at the rate of the product, what they share once; then full batches of one token each, to the end."""
    prompts = sum(request.num_prompt - workload.num_shared for request in workload.requests) + workload.num_shared
    steps = workload.num_output / workload.concurrency
    decoding = steps * step_seconds(size, workload.concurrency, workload.concurrency, rates)
    return 2 * size.num_layer_weights * prompts / rates.flops_per_s + decoding
