"""Dashboards and alerts ask only for what the servers and the operator export."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagefleet_operator.telemetry import Telemetry

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "manifests" / "monitoring"
METRIC = re.compile(r"\b(?:vllm:|pagefleet_)[a-z0-9_:]+")
"""Label names of ours begin with llmdeployment, so every such word is a metric."""


def rules() -> list[dict[str, Any]]:
    spec = yaml.safe_load((MONITORING / "prometheusrule.yaml").read_text())["spec"]
    return [rule for group in spec["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    for path in sorted((MONITORING / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                yield f"{path.stem}: {panel['title']}", target["expr"]
    for rule in rules():
        yield rule["alert"], rule["expr"]


def exported() -> set[str]:
    """Series names: the operator's from its registry, the servers' from their page, which a test keeps complete."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    families = set(re.findall(r"^\| `((?:vllm:|pagefleet_)[a-z0-9_:]+)`", page, re.MULTILINE))
    found = families | {name + suffix for name in families for suffix in ("_bucket", "_sum", "_count")}
    for family in Telemetry().registry.collect():
        found |= {family.name, family.name + "_total", family.name + "_bucket"}
    return found


def test_the_dashboards_are_what_the_tool_makes() -> None:
    tool = ROOT / "tools" / "dashboards.py"
    done = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("where", "query"), list(queries()), ids=lambda value: str(value)[:40])
def test_a_query_names_metrics_that_exist(where: str, query: str) -> None:
    names = set(METRIC.findall(query))
    assert names, f"{where} asks for nothing"
    assert names <= exported(), where


def test_every_panel_has_a_place_of_its_own() -> None:
    for path in (MONITORING / "dashboards").glob("*.json"):
        taken: set[tuple[int, int]] = set()
        for panel in json.loads(path.read_text())["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, (path.name, panel["title"])
            assert place["x"] + place["w"] <= 24
            taken |= cells


def test_every_alert_has_a_page_in_the_runbook() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    headings = {f"docs/runbook.md#{line[3:].strip().lower()}" for line in runbook.splitlines() if line[:3] == "## "}
    for rule in rules():
        assert rule["annotations"]["runbook"] in headings, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Prometheus")
def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    spec = yaml.safe_load((MONITORING / "prometheusrule.yaml").read_text())["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    done = subprocess.run(
        ["promtool", "check", "rules", "rules.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
