"""What people read: `kubectl explain`, `kubectl get` and `kubectl scale` on an LLMDeployment. No operator runs."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.operator_cluster import LLMDS, ROOT, operator_cluster

STATUS = {
    "model": "llama",
    "ready": "2/3",
    "replicas": 2,
    "selector": "a=b",
    "phase": "Scaling",
    "reason": "Rolling",
    "kvBlocks": {"used": 812, "cached": 1, "total": 1330, "waiting": 7, "occupancy": "61%", "summary": "812/1330"},
    "requests": {"running": 9, "waiting": 4},
    "slo": {"timeToFirstTokenMilliseconds": 480, "interTokenLatencyMilliseconds": 31, "attainment": "97%"},
}


@pytest.mark.e2e
async def test_explain_get_and_scale_read_well(tmp_path: Path) -> None:
    crd = yaml.safe_load((ROOT / "crds" / "llmdeployment.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    async with operator_cluster(tmp_path, start=False) as cluster:
        for part in ("spec", "status"):
            listed = await cluster.kubectl("explain", f"llmd.{part}", "--recursive")
            assert set(re.findall(r"^ +(\w+)\t", listed, re.M)) == set(field_names(schema[part]))
        told = " ".join((await cluster.kubectl("explain", "llmd.spec.drain.delaySeconds")).split())
        assert schema["spec"]["properties"]["drain"]["properties"]["delaySeconds"]["description"] in told
        assert "FIELD: delaySeconds <integer>" in told
        await cluster.create({"replicas": 3})
        await cluster.client.patch(LLMDS, "chat", {"status": STATUS}, "default", subresource="status")
        head, row = (await cluster.kubectl("get", "llmd", "-o", "wide")).splitlines()
        assert head.split()[:9] == ["NAME", "MODEL", "READY", "DESIRED", "KV%", "BLOCKS", "QUEUE", "TTFT", "SLO"]
        assert head.split()[9:] == ["PHASE", "AGE", "ITL", "WAITING-BLOCKS", "LAST-SCALE", "REASON"]
        assert row.split()[:10] == ["chat", "llama", "2/3", "3", "61%", "812/1330", "4", "480", "97%", "Scaling"]
        assert row.split()[11:13] == ["31", "7"]
        assert row.split()[-1] == "Rolling"
        await cluster.kubectl("scale", "llmd/chat", "--replicas=5")
        assert (await cluster.llmd())["spec"]["replicas"] == 5
        scale = await cluster.client.get(LLMDS, "chat/scale", "default")
        assert scale["status"] == {"replicas": 2, "selector": "a=b"}, "an autoscaler can select the pods"


def field_names(schema: dict[str, Any]) -> Iterator[str]:
    """Of every field at any depth."""
    for name, child in schema.get("properties", {}).items():
        yield name
        yield from field_names(child)
    if "items" in schema:
        yield from field_names(schema["items"])
