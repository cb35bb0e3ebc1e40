"""Grafana's dashboard format, from panels that are a title, a unit and their queries."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GRID_COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One drawing."""

    title: str
    queries: Sequence[tuple[str, str]]
    """(PromQL, legend)."""
    unit: str = "short"
    """Grafana's unit: short, percentunit, s, reqps, ops."""
    kind: str = "timeseries"
    """timeseries or stat."""
    width: int = 8
    """Of 24 columns."""
    stacked: bool = False
    help: str = ""
    highest: float | None = None
    """Upper end of the axis."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One file."""

    uid: str
    title: str
    variables: Sequence[tuple[str, str]]
    """(name, label_values query)."""
    rows: Sequence[tuple[str, Sequence[Panel]]]


def render(made: Dashboard) -> str:
    """Grafana's JSON."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, drawings in made.rows:
        panels.append(_row(title, top, len(panels) + 1))
        top += 1
        left = height = 0
        for panel in drawings:
            if left + panel.width > GRID_COLUMNS:
                top, left = top + height, 0
            height = 4 if panel.kind == "stat" else 8
            panels.append(_panel(panel, {"x": left, "y": top, "w": panel.width, "h": height}, len(panels) + 1))
            left += panel.width
        top += height
    document = {
        "uid": made.uid,
        "title": made.title,
        "tags": ["pagefleet"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_source_variable(), *(_variable(name, query) for name, query in made.variables)]},
        "panels": panels,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _row(title: str, top: int, number: int) -> dict[str, Any]:
    place = {"x": 0, "y": top, "w": GRID_COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: Panel, place: dict[str, int], number: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": query, "legendFormat": legend}
        for index, (query, legend) in enumerate(panel.queries)
    ]
    custom = {"fillOpacity": 30 if panel.stacked else 5, "stacking": {"mode": "normal" if panel.stacked else "none"}}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.highest is not None:
        defaults["max"] = panel.highest
    if panel.kind == "timeseries":
        defaults["custom"] = custom
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": place,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}} if panel.kind == "timeseries" else {},
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _variable(name: str, query: str) -> dict[str, Any]:
    many = name == "namespace" and "$" not in query
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "includeAll": many,
        "allValue": ".*" if many else None,
        "multi": False,
    }
