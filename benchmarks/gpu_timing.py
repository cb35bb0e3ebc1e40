"""Timing on a CUDA device: graphs, events, medians, and buffers in turn, so that no run finds its data in a cache.

Without one (Triton's interpreter, to try the scripts) a timing is one run of each call by the clock.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WARMUPS = 3
REPEATS = 15
L2_FLUSH_BYTES = 512 * 1024 * 1024
"""One round touches at least so much, several times any L2."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one call."""

    microseconds: float
    """Median over REPEATS replays."""
    spread: float
    """(slowest - fastest) / median over the replays."""


def rotations(bytes_per_call: int, at_most: int = 16) -> int:
    """How many buffer sets one round should walk through."""
    return max(1, min(at_most, -(-L2_FLUSH_BYTES // max(1, bytes_per_call))))


def time_graph(calls: Sequence[Callable[[], object]]) -> Timing:
    """Capture all calls into one graph, replay it, divide by their number. Launch gaps are the graph's."""
    if DEVICE.type != "cuda":
        return _time_once(calls)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(WARMUPS):
        graph.replay()
    samples = []
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        samples.append(start.elapsed_time(stop) * 1e3 / len(calls))
    median = statistics.median(samples)
    return Timing(microseconds=median, spread=(max(samples) - min(samples)) / median)


def _time_once(calls: Sequence[Callable[[], object]]) -> Timing:
    began = time.perf_counter()
    for call in calls:
        call()
    return Timing(microseconds=(time.perf_counter() - began) * 1e6 / len(calls), spread=0.0)


def copy_bandwidth(num_bytes: int) -> float:
    """GB/s of a device-to-device copy of so many bytes, read and write counted."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    timing = time_graph([lambda: target.copy_(source)])
    return 2 * source.nbytes / timing.microseconds / 1e3


def matmul_rate(width: int) -> float:
    """TFLOP/s of a bf16 product of two random width x width matrices."""
    a = torch.randn(width, width, device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn(width, width, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    timing = time_graph([lambda: torch.mm(a, b, out=out)])
    return 2 * width**3 / timing.microseconds / 1e6
