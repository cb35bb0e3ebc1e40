"""Results as text: one table for the terminal and Markdown."""

import math
from collections.abc import Sequence

from pagefleet_simulator.catalog import Settings
from pagefleet_simulator.compare import FIXED, OURS, Cell, Trial, best_of, by_case, loads, tuned, verdict
from pagefleet_simulator.results import Result

HEADER = ("policy", "within SLO", "failed", "queued", "TTFT p95", "GPU-hours", "changes", "reversals", "most replicas")
NAMES = {
    "pagefleet": "PageFleet, untaught",
    "pagefleet-learnt": "PageFleet, learnt",
    "pagefleet-tuned": "PageFleet, tuned",
    "hpa": "HPA v2",
    "kpa": "Knative KPA",
    "apa": "AIBrix APA",
    "wva1": "WVA V1",
    "wva2": "WVA V2",
    "kubeai": "KubeAI",
    "static": "static",
}


def row(name: str, result: Result) -> tuple[str, ...]:
    """One line, by HEADER."""
    first = result.p95_first_token_seconds
    return (
        name,
        f"{result.attainment_percent:.1f} %",
        str(result.failed),
        str(result.queued),
        "never" if math.isinf(first) else f"{first:.1f} s",
        f"{result.device_hours:.2f}",
        str(result.changes),
        str(result.reversals),
        str(result.most_replicas),
    )


def markdown(rows: Sequence[Sequence[str]], header: Sequence[str] = HEADER) -> str:
    """A table with the first column left, the others right."""
    widths = [max(len(line[index]) for line in [header, *rows]) for index in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    ruler = "|" + "|".join(("-" * (width + 1) + (":" if index else "-")) for index, width in enumerate(widths)) + "|"
    return "\n".join([line(header), ruler, *(line(cells) for cells in rows)])


def say(settings: Settings) -> str:
    """Settings in a line."""
    return (
        ", ".join(
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in settings.items()
        )
        or "defaults"
    )


def grid_report(trials: Sequence[Trial]) -> str:
    """Every grid point and the one chosen, by trace and policy."""
    parts: list[str] = []
    for load, policy in dict.fromkeys((trial.load, trial.policy) for trial in trials):
        of_it = [trial for trial in trials if (trial.load, trial.policy) == (load, policy)]
        chosen = tuned(of_it)
        lines = [
            (
                ("**" + say(trial.settings) + "**") if trial is chosen else say(trial.settings),
                f"{trial.result.attainment_percent:.1f} %",
                f"{trial.result.device_hours:.2f}",
            )
            for trial in of_it
        ]
        parts.append(f"{NAMES[policy]} on {load}:\n\n" + markdown(lines, ("settings", "within SLO", "GPU-hours")))
    return "\n\n".join(parts)


def comparison(cells: Sequence[Cell]) -> str:
    """A table of verdicts, and one for each trace and start-up time."""
    described = loads(0.01)
    parts: list[str] = []
    sums: list[tuple[str, ...]] = []
    for (routing, load, start), group in by_case(cells).items():
        case = f"{load}, {start:g} s" + ("" if routing == "connection" else f", {routing}")
        autoscaler = best_of([cell for cell in group if cell.policy not in (*OURS, FIXED)])
        fixed = best_of([cell for cell in group if cell.policy == FIXED])
        text = [f"### {case}", "", f"{described[load].what}.", ""]
        text.append(markdown([row(NAMES[cell.policy], cell.result) for cell in group]))
        for ours in (cell for cell in group if cell.policy in OURS):
            line = [case, NAMES[ours.policy], _point(ours)]
            for other in (autoscaler, fixed):
                line += ["", ""] if other is None else [_point(other, named=True), verdict(ours.result, other.result)]
            fewest = min((cell.result.failed for cell in group if cell.policy not in OURS), default=ours.result.failed)
            sums.append((*line, f"{ours.result.failed} / {fewest}", str(ours.result.reversals)))
        parts.append("\n".join(text))
    parted = {
        "all cases": cells,
        "all but first jumps": [cell for cell in cells if not described[cell.load].is_first],
        "first jumps": [cell for cell in cells if described[cell.load].is_first],
    }
    totals = [markdown(_totals(group), (title, *TOTALS)) for title, group in parted.items() if group]
    return "\n\n".join([*totals, markdown(sums, SUMS), *parts])


def _totals(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """Each policy over all cases with the routing that ships."""
    cells = [cell for cell in cells if cell.routing == "connection"]
    rows: list[tuple[str, ...]] = []
    for policy in dict.fromkeys(cell.policy for cell in cells):
        results = [cell.result for cell in cells if cell.policy == policy]
        rows.append(
            (
                NAMES[policy],
                f"{sum(result.attainment_percent for result in results) / len(results):.1f} %",
                f"{min(result.attainment_percent for result in results):.1f} %",
                f"{sum(result.device_hours for result in results):.1f}",
                str(sum(result.failed for result in results)),
                str(sum(result.changes for result in results)),
                str(sum(result.reversals for result in results)),
            )
        )
    return rows


TOTALS = ("within SLO, mean", "worst", "GPU-hours", "failed", "changes", "reversals")


SUMS = (
    "trace, start-up",
    "ours",
    "SLO / GPU-h",
    "best autoscaler",
    "against it",
    "best static",
    "against it",
    "failed / fewest of others",
    "reversals",
)


def _point(cell: Cell, *, named: bool = False) -> str:
    point = f"{cell.result.attainment_percent:.1f} % / {cell.result.device_hours:.2f}"
    return f"{NAMES[cell.policy]} {point}" if named else point
