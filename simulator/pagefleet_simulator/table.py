"""Results as text: one table for the terminal and Markdown."""

import math
from collections.abc import Sequence

from pagefleet_simulator.catalog import Settings
from pagefleet_simulator.compare import OURS, Cell, Trial, best_baseline, by_case, loads, tuned, verdict
from pagefleet_simulator.results import Result

HEADER = ("policy", "within SLO", "failed", "queued", "TTFT p95", "GPU-hours", "changes", "reversals", "most replicas")
NAMES = {
    "pagefleet": "PageFleet",
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
    """A table for each trace and start-up time, with the verdict against the best baseline, and the sums."""
    parts: list[str] = []
    sums: list[tuple[str, ...]] = []
    described = loads(0.01)
    for (routing, load, start), group in by_case(cells).items():
        heading = f"### {load}, start-up {start:g} s" + ("" if routing == "connection" else f", routing {routing}")
        text = [
            heading,
            "",
            f"{described[load].what}.",
            "",
            markdown([row(NAMES[cell.policy], cell.result) for cell in group]),
        ]
        ours = next((cell for cell in group if cell.policy == OURS), None)
        if ours is not None and len(group) > 1:
            best = best_baseline(group)
            word = verdict(ours.result, best.result)
            text += [
                "",
                f"Best baseline: {NAMES[best.policy]} ({say(best.settings)}). PageFleet {word}: "
                f"{ours.result.attainment_percent - best.result.attainment_percent:+.1f} points at "
                f"{ours.result.device_hours - best.result.device_hours:+.2f} GPU-hours.",
            ]
            sums.append(
                (
                    f"{load}, {start:g} s" + ("" if routing == "connection" else f", {routing}"),
                    f"{ours.result.attainment_percent:.1f} % / {ours.result.device_hours:.2f}",
                    f"{NAMES[best.policy]} {best.result.attainment_percent:.1f} % / {best.result.device_hours:.2f}",
                    word,
                    f"{ours.result.failed} / {min(cell.result.failed for cell in group if cell is not ours)}",
                    str(ours.result.reversals),
                )
            )
        parts.append("\n".join(text))
    header = (
        "trace, start-up",
        "PageFleet SLO / GPU-h",
        "best baseline SLO / GPU-h",
        "PageFleet",
        "failed / fewest of others",
        "reversals",
    )
    return "\n\n".join([*([markdown(sums, header)] if sums else []), *parts])
