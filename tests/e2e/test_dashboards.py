"""Every query of the dashboards and alerts on a real Prometheus that scraped a fleet while it grew and shrank."""

import asyncio
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from demo.load import Load
from support.evidence import write_evidence
from support.fleet import Fleet, deployment
from support.prometheus import EXECUTABLE, Prometheus, free_port
from support.smollm2 import smollm2_gguf

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "manifests" / "monitoring"
NAME = "smollm2"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.skipif(EXECUTABLE is None, reason="needs the program prometheus"),
]


def panels() -> Iterator[tuple[str, dict[str, Any], str, str]]:
    """(dashboard, panel, query, legend)."""
    for path in sorted((MONITORING / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                query = target["expr"].replace("$namespace", ".*").replace("$llmdeployment", NAME)
                yield path.stem, panel, query, target["legendFormat"]


def wanted() -> dict[str, Any]:
    return {
        "engine": {
            "args": ["--threads=1", "--num-kv-blocks=90"],
            "env": [{"name": "PAGEFLEET_CACHE_DIR", "value": str(Path.home() / ".cache" / "pagefleet")}],
            "maxQueueLength": 64,
        },
        "autoscaling": {
            "minReplicas": 1,
            "maxReplicas": 3,
            "targets": {"kvBlockOccupancyPercent": 80},
            "slo": {"percentile": 95, "timeToFirstTokenMilliseconds": 2000},
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 15}},
        },
    }


def test_every_query_returns_data(tmp_path: Path) -> None:
    rules: dict[str, Any] = yaml.safe_load((MONITORING / "prometheusrule.yaml").read_text())["spec"]
    listen = f"127.0.0.1:{free_port()}"
    with Fleet(tmp_path, operator_flags=("--listen", listen)) as fleet:
        fleet.apply(deployment(NAME, smollm2_gguf(), **wanted()))
        with Prometheus(tmp_path, fleet, operator=listen, name=NAME, rules=yaml.safe_dump(rules)) as prometheus:
            start = time.time()
            fleet.wait_available(NAME, seconds=180)

            async def drive() -> dict[str, int]:
                async with Load(fleet.service_url(NAME), streams=14, max_tokens=110) as load:
                    await asyncio.to_thread(fleet.until, "the fleet grew", lambda: ready(fleet) >= 2, seconds=240)
                    await asyncio.sleep(10)
                return load.counts

            counts = asyncio.run(drive())
            assert counts["broken"] == 0
            fleet.until("the fleet shrank", lambda: ready(fleet) == 1, seconds=180)
            end = time.time()
            drawn: list[dict[str, Any]] = [
                {"dashboard": board, "panel": panel, "legend": legend, "query": query, "series": series}
                for board, panel, query, legend in panels()
                if (series := prometheus.range(query, start=start, end=end)) is not None
            ]
            alerts = prometheus.rules()
    empty = [f"{item['dashboard']}: {item['panel']['title']}: {item['query']}" for item in drawn if not has_data(item)]
    assert empty == []
    assert all(rule["health"] == "ok" for rule in alerts), alerts
    assert len(alerts) == sum(len(group["rules"]) for group in rules["groups"])
    (tmp_path / "drawn.json").write_text(json.dumps({"start": start, "end": end, "drawn": drawn}))
    write_evidence(
        "dashboards",
        {
            "seconds": round(end - start),
            "streams": counts,
            "queries_with_data": len(drawn),
            "alerts_evaluated": len(alerts),
        },
    )
    print(f"data for tools/dashboard_pictures.py: {tmp_path / 'drawn.json'}")


def ready(fleet: Fleet) -> int:
    return int(fleet.get("llmd", NAME).get("status", {}).get("readyReplicas", 0))


def has_data(item: dict[str, Any]) -> bool:
    return any(math.isfinite(float(value)) for series in item["series"] for _, value in series["values"])
