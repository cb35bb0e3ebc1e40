"""Draws the dashboards from what a real Prometheus answered, as Grafana lays them out.

    python tools/dashboard_pictures.py DRAWN.json [--output docs/pictures]

DRAWN.json comes from `pytest -m long tests/e2e/test_dashboards.py`. Needs matplotlib (the extra `sim`).
"""

import argparse
import json
import math
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLUMNS = 24
GAP_ROWS = 2
"""Grid rows below a panel that its axis and the next title take."""
ROOT = Path(__file__).resolve().parents[1]


def draw(name: str, items: list[dict[str, Any]], start: float, output: Path) -> None:
    """One dashboard into output/NAME.svg."""
    panels = {item["panel"]["id"]: item["panel"] for item in items}
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels.values())
    figure = plt.figure(figsize=(15, rows * 0.36))
    grid = figure.add_gridspec(rows, COLUMNS, hspace=0.0, wspace=6.0, left=0.04, right=0.99, top=0.97, bottom=0.04)
    for number, panel in panels.items():
        place = panel["gridPos"]
        axes = figure.add_subplot(
            grid[place["y"] : place["y"] + max(1, place["h"] - GAP_ROWS), place["x"] : place["x"] + place["w"]]
        )
        axes.set_title(panel["title"], fontsize=9, loc="left")
        queries = [item for item in items if item["panel"]["id"] == number]
        (_draw_number if panel["type"] == "stat" else _draw_lines)(axes, panel, queries, start)
    figure.suptitle(f"PageFleet / {name.capitalize()}", fontsize=11, x=0.01, ha="left")
    figure.savefig(output / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def _draw_lines(axes: Any, panel: dict[str, Any], queries: list[dict[str, Any]], start: float) -> None:
    lines = [
        ([time - start for time, _ in series["values"]], _numbers(series), _legend(item["legend"], series["metric"]))
        for item in queries
        for series in item["series"]
    ]
    for seconds, values, legend in lines:
        axes.plot(seconds, values, linewidth=1.2, label=legend)
    defaults = panel["fieldConfig"]["defaults"]
    axes.set_ylim(bottom=0, top=defaults.get("max"))
    axes.set_xlim(left=0)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    if defaults["unit"] == "percentunit":
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if defaults["unit"] == "s":
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g} s")
    if 0 < len(lines) <= 8:
        axes.legend(fontsize=6, loc="upper left", framealpha=0.5)


def _draw_number(axes: Any, panel: dict[str, Any], queries: list[dict[str, Any]], start: float) -> None:
    values = [value for item in queries for series in item["series"] for value in _numbers(series)]
    highest = max((value for value in values if math.isfinite(value)), default=math.nan)
    text = f"{highest:.0%}" if panel["fieldConfig"]["defaults"]["unit"] == "percentunit" else f"{highest:.4g}"
    axes.text(0.5, 0.45, text, fontsize=18, ha="center", va="center")
    axes.text(0.5, 0.05, "highest of the run", fontsize=6, ha="center", va="center", alpha=0.6)
    axes.set_axis_off()


def _numbers(series: dict[str, Any]) -> list[float]:
    return [float(value) for _, value in series["values"]]


def _legend(pattern: str, labels: dict[str, str]) -> str:
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), pattern)
    return re.sub(r"-[a-z0-9]{6,10}-([a-z0-9]{5})\b", r"-\1", text)


def main() -> None:
    """Draw them all."""
    parser = argparse.ArgumentParser(description="Draws the dashboards from what a real Prometheus answered.")
    parser.add_argument("drawn", type=Path)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    found = json.loads(arguments.drawn.read_text())
    for name, items in groupby(found["drawn"], key=lambda item: item["dashboard"]):
        draw(name, list(items), found["start"], arguments.output)


if __name__ == "__main__":
    main()
