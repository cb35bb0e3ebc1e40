"""The samples for an external HPA and for KEDA: they point at what the CRD serves and at metrics that exist."""

import re
from pathlib import Path
from typing import Any

import yaml

from pagefleet_server.api.gauges import GaugeView
from pagefleet_server.api.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "manifests" / "samples"


def load(name: str) -> Any:
    return yaml.safe_load((SAMPLES / name).read_text())


def crd() -> Any:
    return yaml.safe_load((ROOT / "crds" / "llmdeployment.yaml").read_text())


def served_metrics() -> str:
    return Metrics("m", GaugeView).render().decode()


def check_target(reference: dict[str, str]) -> None:
    definition = crd()
    version = next(item for item in definition["spec"]["versions"] if item["storage"])
    assert reference["apiVersion"] == f"{definition['spec']['group']}/{version['name']}"
    assert reference["kind"] == definition["spec"]["names"]["kind"]
    scale = version["subresources"]["scale"]
    assert scale["specReplicasPath"] == ".spec.replicas"
    assert scale["labelSelectorPath"] == ".status.selector"
    sample = load("quickstart.yaml")
    assert reference["name"] == sample["metadata"]["name"]


def test_the_hpa_sample() -> None:
    spec = load("hpa.yaml")["spec"]
    check_target(spec["scaleTargetRef"])
    assert 1 <= spec["minReplicas"] <= spec["maxReplicas"]
    names = [item["pods"]["metric"]["name"] for item in spec["metrics"]]
    assert names == ["vllm:kv_cache_usage_perc", "vllm:num_requests_waiting"]
    for name in names:
        assert f"# TYPE {name} gauge" in served_metrics()


def test_the_keda_sample() -> None:
    spec = load("keda.yaml")["spec"]
    check_target(spec["scaleTargetRef"])
    assert 1 <= spec["minReplicaCount"] <= spec["maxReplicaCount"]
    for trigger in spec["triggers"]:
        query = trigger["metadata"]["query"]
        found = re.fullmatch(r'(avg|sum)\((vllm:\w+)\{model_name="([^"]+)"\}\)', query)
        assert found is not None, query
        assert f"# TYPE {found[2]} gauge" in served_metrics()
        assert found[3] == load("quickstart.yaml")["spec"]["model"].get("servedName", "smollm2")
        # A mean is compared as it is, a sum is divided by the replicas: the other way round the count is wrong.
        assert trigger["metricType"] == ("Value" if found[1] == "avg" else "AverageValue")
        assert float(trigger["metadata"]["threshold"]) > 0
