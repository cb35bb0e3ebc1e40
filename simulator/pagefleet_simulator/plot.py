"""A run as a picture: load, replicas, occupancy, queue and first-token latency over time."""

from collections.abc import Sequence
from pathlib import Path

from pagefleet_simulator.results import percentile
from pagefleet_simulator.simulation import Outcome
from pagefleet_simulator.workload import Workload

BIN_SECONDS = 30.0
SUFFIXES = (".png", ".svg")


class PlotError(RuntimeError):
    """matplotlib is not installed."""


def draw(workload: Workload, outcome: Outcome, title: str, path: Path) -> list[Path]:
    """Write PNG and SVG beside each other as `path`.png and `path`.svg; gives both. Raises PlotError, OSError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("plots need matplotlib: pip install 'pagefleet[sim]'") from error
    times = [point.time / 60 for point in outcome.timeline]
    bins, rates, latencies = _binned(workload, outcome)
    figure = Figure(figsize=(10, 11), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(5, 1, sharex=True)
    rows: Sequence[tuple[str, list[tuple[str, list[float], list[float]]]]] = (
        ("requests / s", [("", bins, rates)]),
        (
            "replicas",
            [
                ("wanted", times, [float(point.wanted) for point in outcome.timeline]),
                ("ready", times, [float(point.ready) for point in outcome.timeline]),
            ],
        ),
        ("KV blocks used, %", [("", times, [point.used_percent for point in outcome.timeline])]),
        ("requests waiting", [("", times, [float(point.waiting) for point in outcome.timeline])]),
        ("first token p95, s", [("", bins, latencies)]),
    )
    for axis, (label, lines) in zip(axes, rows, strict=True):
        for name, xs, ys in lines:
            axis.plot(xs, ys, label=name or None, linewidth=1.2, drawstyle="steps-post" if name else "default")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        if len(lines) > 1:
            axis.legend(loc="upper right")
    axes[-1].set_xlabel("minutes")
    written = [path.with_name(path.name + suffix) for suffix in SUFFIXES]
    for target in written:
        figure.savefig(target, dpi=110)
    return written


def _binned(workload: Workload, outcome: Outcome) -> tuple[list[float], list[float], list[float]]:
    """(minutes, requests a second, 95th percentile of the first token) by time of arrival. Failed ones have none."""
    count = max(1, int(workload.seconds / BIN_SECONDS) + 1)
    arrivals = [0] * count
    first: list[list[float]] = [[] for _ in range(count)]
    for served in outcome.served:
        index = min(count - 1, int(served.arrival.time / BIN_SECONDS))
        arrivals[index] += 1
        if served.first_token is not None:
            first[index].append(served.time_to_first_token)
    minutes = [index * BIN_SECONDS / 60 for index in range(count)]
    rates = [number / BIN_SECONDS for number in arrivals]
    return minutes, rates, [percentile(sorted(values), 95) for values in first]
