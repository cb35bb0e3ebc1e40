"""The Helm chart and the kustomizations give the same objects; wrong values are refused by name."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.shipped import kustomized

helm_chart = pytest.importorskip("helm_python.chart", reason="the Helm library exists for Linux only")

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "pagefleet"
Objects = dict[tuple[str, str], dict[str, Any]]
NAMESPACE = "pagefleet"


def keyed(documents: Iterable[dict[str, Any] | None]) -> Objects:
    return {(item["kind"], item["metadata"]["name"]): item for item in documents if item}


def from_chart(**values: Any) -> Objects:
    with helm_chart.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        rendered = chart.render(values, name="pagefleet", namespace=NAMESPACE)
        crds = [yaml.safe_load(item["data"]) for item in chart.crds]
    texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    return keyed([document for text in texts for document in yaml.safe_load_all(text)] + crds)


def from_kustomize(overlay: str) -> Objects:
    found = keyed(kustomized(overlay))
    # Helm makes the namespace by --create-namespace, not from a template.
    return {key: item for key, item in found.items() if key[0] != "Namespace"}


@pytest.mark.parametrize(("overlay", "scope"), [("namespaced", "Namespaced"), ("cluster-wide", "ClusterWide")])
def test_chart_and_kustomization_are_the_same(overlay: str, scope: str) -> None:
    want = from_kustomize(overlay)
    got = from_chart(scope=scope)
    assert set(got) == set(want)
    for key, item in want.items():
        assert got[key] == item, key


def test_a_laptops_values_are_the_dev_overlay() -> None:
    want = from_kustomize("dev")
    got = from_chart(operator={"replicas": 1, "logLevel": "debug", "imagePullPolicy": "Never"})
    assert got[("Deployment", "pagefleet-operator")] == want[("Deployment", "pagefleet-operator")]


def test_monitoring_of_the_chart_is_the_monitoring_kustomization() -> None:
    switched_on = {name: {"enabled": True} for name in ("podMonitors", "alerts", "dashboards")}
    got, want = from_chart(**switched_on), from_kustomize("monitoring")
    for key, item in want.items():
        made = got[key]
        assert made["metadata"].pop("namespace") == NAMESPACE
        assert made == item, key
    assert {kind for kind, _ in want} == {"PodMonitor", "PrometheusRule", "ConfigMap"}


def test_every_value_reaches_an_object() -> None:
    """A value that is accepted and does nothing would be a promise that nobody keeps."""
    operator = {
        "image": "mirror/op:9",
        "imagePullPolicy": "Always",
        "imagePullSecrets": [{"name": "pull-secret"}],
        "replicas": 4,
        "logLevel": "warning",
        "args": ["--lease-seconds=33"],
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "resources": {"limits": {"memory": "777Mi"}},
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "only-system", "operator": "Exists"}],
    }
    values: dict[str, Any] = {
        "scope": "ClusterWide",
        "operator": operator,
        "serverImage": "mirror/server:9",
        "podMonitors": {"enabled": True, "interval": "7s", "labels": {"monitor": "by-me"}},
        "alerts": {"enabled": True, "labels": {"alert": "to-me"}},
        "dashboards": {"enabled": True, "labels": {"board": "here"}},
        "networkPolicy": {"enabled": False},
    }
    with helm_chart.Chart.load(CHART) as chart:
        defaults = chart.values
    assert leaves(defaults) <= leaves(values) | {("operator", "resources", "requests")}
    got = from_chart(**values)
    text = yaml.safe_dump_all(got.values())
    for word in (
        *("mirror/op:9", "imagePullPolicy: Always", "pull-secret", "replicas: 4", "--log-level=warning"),
        *("--lease-seconds=33", "http://proxy:3128", "777Mi", "pool: system", "only-system", "--all-namespaces"),
        *("mirror/server:9", "interval: 7s", "monitor: by-me", "alert: to-me", "board: here"),
    ):
        assert word in text, word
    assert ("NetworkPolicy", "pagefleet-operator") not in got


def leaves(values: dict[str, Any], *path: str) -> set[tuple[str, ...]]:
    """Paths of the fields; an empty mapping and what stands under a free-form one count as one field."""
    found: set[tuple[str, ...]] = set()
    for key, value in values.items():
        free_form = key in ("labels", "nodeSelector", "requests", "limits")
        found |= leaves(value, *path, key) if isinstance(value, dict) and not free_form else {(*path, key)}
    return found


@pytest.mark.parametrize(
    ("values", "want_key"),
    [
        ({"operatr": {}}, "operatr"),
        ({"operator": {"imag": "x"}}, "imag"),
        ({"operator": {"replicas": 0}}, "replicas"),
        ({"operator": {"replicas": "two"}}, "replicas"),
        ({"operator": {"logLevel": "loud"}}, "logLevel"),
        ({"scope": "Everything"}, "scope"),
        ({"podMonitors": {"interval": "often"}}, "interval"),
        ({"dashboards": {"enabled": "yes"}}, "enabled"),
        ({"operator": {"args": "--debug"}}, "args"),
    ],
)
def test_a_wrong_value_fails_with_its_key(values: dict[str, Any], want_key: str) -> None:
    with helm_chart.Chart.load(CHART) as chart, pytest.raises(Exception, match=want_key):
        chart.validate_schema(values)


def test_the_chart_passes_helms_own_linter() -> None:
    found = helm_chart.lint(CHART, {}, strict=True)
    messages = [item for item in found["messages"] if "icon is recommended" not in str(item)]
    assert messages == []


def test_old_kubernetes_is_refused_by_the_chart() -> None:
    with helm_chart.Chart.load(CHART) as chart:
        assert chart.metadata["kubeVersion"] == ">=1.30.0-0"


def test_the_charts_version_is_the_packages() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    with helm_chart.Chart.load(CHART) as chart:
        assert f'version = "{chart.metadata["appVersion"]}"' in project
        assert chart.values["operator"]["image"].endswith(f":{chart.metadata['appVersion']}")
