"""Manifests and samples against Kubernetes' own schemas, strictly: a misspelt field is an error."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from pagefleet_operator.parsing import parse
from support.shipped import children_of, kustomized

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = ("pagefleet.dev", "keda.sh", "monitoring.coreos.com", "inference.networking.k8s.io")
"""API groups whose schemas Kubernetes does not have."""
VERSIONS = ("1.30.0", "1.36.0")
"""The oldest that is supported, and a new one."""


def objects() -> Iterator[Any]:
    for name in ("cluster-wide", "dev"):
        for item in kustomized(name):
            yield pytest.param(item, id=f"{name}-{item['kind']}")
    for path in sorted((ROOT / "manifests" / "samples").glob("*.yaml")):
        for item in yaml.safe_load_all(path.read_text()):
            yield pytest.param(item, id=f"{path.stem}-{item['kind']}")


@pytest.mark.parametrize("item", list(objects()))
@pytest.mark.parametrize("version", VERSIONS)
def test_an_object_is_what_kubernetes_takes(item: dict[str, Any], version: str) -> None:
    if item["apiVersion"].split("/")[0] in FOREIGN:
        assert item["metadata"]["name"]
        return
    kubernetes_validate.validate(item, version, strict=True)


def served_samples() -> list[Any]:
    return [
        pytest.param(item, id=path.stem)
        for path in sorted((ROOT / "manifests" / "samples").glob("*.yaml"))
        for item in yaml.safe_load_all(path.read_text())
        if item["kind"] == "LLMDeployment"
    ]


@pytest.mark.parametrize("sample", served_samples())
@pytest.mark.parametrize("version", VERSIONS)
def test_what_the_operator_makes_of_a_sample_is_what_kubernetes_takes(sample: dict[str, Any], version: str) -> None:
    sample["metadata"] |= {"namespace": "default", "uid": "u"}
    for child in children_of(parse(sample)):
        kubernetes_validate.validate(child, version, strict=True)


def test_the_check_would_see_a_misspelt_field() -> None:
    (deployment,) = [item for item in kustomized("dev") if item["kind"] == "Deployment"]
    deployment["spec"]["template"]["spec"]["containerz"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[0], strict=True)
