"""Tables of what was measured. Pure."""

import statistics
from collections.abc import Sequence

from benchmarks.serving.outcome import Record, Run

IN_TOTAL = "B"
"""The workload whose rate counts prompt tokens too."""


def between_marks(page: str, name: str, text: str) -> str:
    """The page with the text between `<!-- NAME -->` and `<!-- /NAME -->`. Raises ValueError without these marks."""
    before, begin, rest = page.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    if not begin or not end:
        raise ValueError(f"the page has no <!-- {name} --> and <!-- /{name} -->")
    return f"{before}{begin}\n{text}\n\n{end}{after}"


def rate(run: Run) -> float:
    """The figure that servers are compared by."""
    return run.total_tokens_per_s if run.workload == IN_TOTAL else run.out_tokens_per_s


def believed(runs: Sequence[Run]) -> list[Run]:
    """The clean runs; all of them if none is."""
    return [run for run in runs if run.clean] or list(runs)


def ratios(runs: Sequence[Run], ours: str, peer: str) -> list[float]:
    """ours / peer, round by round, of rounds in which both are to be believed."""
    pairs: dict[tuple[int, str], float] = {}
    for run in believed([run for run in runs if run.peer == ours]) + believed([r for r in runs if r.peer == peer]):
        pairs[run.round, run.peer] = rate(run)
    rounds = {index for index, _ in pairs}
    return [
        pairs[index, ours] / pairs[index, peer]
        for index in sorted(rounds)
        if (index, ours) in pairs and pairs.get((index, peer))
    ]


def spread(values: Sequence[float], digits: int) -> str:
    """median (least to most)."""
    if not values:
        return "-"
    middle, low, high = statistics.median(values), min(values), max(values)
    if len(values) == 1:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def markdown(record: Record, reference: str = "ours") -> str:
    """All tables."""
    parts = [" · ".join(f"{key} {value}" for key, value in record.facts.items())]
    for workload in sorted({run.workload for run in record.runs}):
        runs = [run for run in record.runs if run.workload == workload]
        parts.append(_workload_table(runs, workload, reference))
        if workload in record.floors:
            parts.append(_floor(runs, record.floors[workload], reference))
    if record.starts:
        parts.append(_server_table(record))
    if record.cross_checks:
        parts.append("A by `vllm bench serve`:\n\n" + "\n".join(f"- {line}" for line in record.cross_checks))
    return "\n\n".join(parts)


def _floor(runs: Sequence[Run], floor: float, reference: str) -> str:
    """How far the reference is from what the machine allows."""
    own = [rate(run) for run in believed([run for run in runs if run.peer == reference])]
    reached = f"; {reference} reaches {statistics.median(own) / floor:.0%} of it" if own else ""
    return f"The machine allows {floor:.0f} in bfloat16{reached}."


def _workload_table(runs: Sequence[Run], workload: str, reference: str) -> str:
    unit = "total tok/s" if workload == IN_TOTAL else "out tok/s"
    lines = [
        f"| {workload} | {unit} | {reference} / peer | TTFT p50 / p95, ms | ITL p50 / p95, ms | runs (clean) "
        "| other cores |",
        "|---|---|---|---|---|---|---|",
    ]
    for peer in dict.fromkeys(run.peer for run in runs):
        own = [run for run in runs if run.peer == peer]
        good = believed(own)
        ratio = "" if peer == reference else spread(ratios(runs, reference, peer), 2)
        first = " / ".join(f"{statistics.median(run.ttft_ms[i] for run in good):.0f}" for i in (0, 1))
        gap = " / ".join(f"{statistics.median(run.itl_ms[i] for run in good):.1f}" for i in (0, 1))
        failed = sum(run.num_failed for run in own)
        clean = f"{len(own)} ({sum(run.clean for run in own)})" + (f", {failed} requests failed" if failed else "")
        others = f"{max(run.other_cores for run in good):.2f}"
        cells = [peer, spread([rate(run) for run in good], 0), ratio, first, gap, clean, others]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _server_table(record: Record) -> str:
    lines = ["| server | start to first answer, s | peak memory, MiB |", "|---|---|---|"]
    for start in record.starts:
        name = f"{start.peer} ({start.version})" if start.version else start.peer
        peak = record.peak_mib.get(start.peer, 0.0)
        lines.append(f"| {name} | {start.seconds:.1f} | {f'{peak:.0f}' if peak else 'it had ended by itself'} |")
    return "\n".join(lines)
