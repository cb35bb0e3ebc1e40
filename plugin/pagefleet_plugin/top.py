"""The live view: a table of deployments and their pods, with a bar for the blocks. Pure but for `frames`."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from pagefleet_plugin.deployment import Blocks, Deployment, Pod

BAR_CELLS = 20
NAME_CELLS, CELL_CELLS = 63, 16
"""Widest cells: one odd value must not push the other columns out."""
PHASE_STYLES = {"Available": "green", "Degraded": "bold red", "Stopped": "dim"}
POD_STYLES = {"Ready": "green", "Draining": "yellow", "Starting": "cyan"}
UNKNOWN = "-"


def bar(used: float, cached: float, *, cells: int = BAR_CELLS) -> Text:
    """Shares of all blocks, 0..1, as cells: used full, cached light, free dots. Rounded so that they sum to `cells`."""
    full = min(cells, round(max(0.0, used) * cells))
    light = min(cells - full, round(max(0.0, cached) * cells))
    style = "red" if used >= 0.9 else "yellow" if used >= 0.75 else "green"
    return Text.assemble(("█" * full, style), ("▒" * light, "blue"), ("·" * (cells - full - light), "dim"))


def table(deployments: Sequence[Deployment], *, pods: bool = True) -> Table:
    """All deployments, worst occupancy first; each with its pods below when `pods`."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for title in (
        "NAME",
        "READY",
        "BLOCKS",
        "KV%",
        "USED",
        "WAITING",
        "RUNNING",
        "QUEUE",
        "TTFT",
        "ITL",
        "SLO",
        "PHASE",
    ):
        made.add_column(
            title,
            justify="left" if title in ("NAME", "BLOCKS", "PHASE") else "right",
            no_wrap=True,
            max_width=NAME_CELLS if title == "NAME" else None if title == "BLOCKS" else CELL_CELLS,
        )
    for found in sorted(deployments, key=lambda one: (-(one.blocks.occupancy or 0), one.namespace, one.name)):
        made.add_row(*_deployment_row(found))
        if pods:
            for pod in found.pods:
                made.add_row(*_pod_row(pod))
    return made


def document(deployments: Sequence[Deployment]) -> list[dict[str, Any]]:
    """The same as JSON values."""
    return [
        {key: value for key, value in asdict(found).items() if key not in ("decisions", "conditions")}
        | {"occupancy": found.blocks.occupancy}
        for found in deployments
    ]


def _deployment_row(found: Deployment) -> list[str | Text]:
    blocks = found.blocks
    wanted = UNKNOWN if found.wanted is None else str(found.wanted)
    target = (
        f"{wanted}→{found.desired}" if found.mode == "DryRun" and found.desired not in (None, found.wanted) else wanted
    )
    return [
        Text(f"{found.namespace}/{found.name}", style="bold"),
        f"{found.ready}/{target}",
        _blocks_bar(blocks),
        _percent(blocks.occupancy),
        f"{blocks.used}/{blocks.total}" if blocks.total else UNKNOWN,
        str(blocks.waiting),
        str(found.running),
        Text(str(found.waiting), style="yellow" if found.waiting else ""),
        _milliseconds(found.first_token_ms),
        _milliseconds(found.inter_token_ms),
        Text(found.attainment or UNKNOWN),
        Text(found.phase, style=PHASE_STYLES.get(found.phase, "yellow")),
    ]


def _pod_row(pod: Pod) -> list[str | Text]:
    occupancy = pod.occupancy
    return [
        Text(f"  {pod.name}", style="dim"),
        "",
        bar(occupancy, 0.0) if occupancy is not None else Text(UNKNOWN, style="dim"),
        _percent(occupancy),
        "",
        "",
        "",
        str(pod.waiting) if occupancy is not None else UNKNOWN,
        "",
        "",
        "",
        Text(pod.state, style=POD_STYLES.get(pod.state, "red")),
    ]


def _blocks_bar(blocks: Blocks) -> Text:
    if blocks.occupancy is None:
        return Text(UNKNOWN, style="dim")
    return bar(blocks.occupancy, blocks.cached / blocks.total)


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"


def _milliseconds(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value} ms"
