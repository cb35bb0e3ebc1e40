"""Pages that are generated from the code are what the code says; samples are admitted."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pagefleet_operator.conditions import OBJECTIVE_MESSAGES
from pagefleet_operator.main import parse_arguments
from pagefleet_operator.parsing import parse
from pagefleet_operator.telemetry import Telemetry

ROOT = Path(__file__).resolve().parents[2]


def test_the_crd_page_is_generated_from_the_crd() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "crd_docs.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "manifests" / "samples").glob("*.yaml")), ids=lambda path: path.name)
def test_samples_are_valid(path: Path) -> None:
    for body in yaml.safe_load_all(path.read_text()):
        if body["kind"] == "LLMDeployment":
            body["metadata"] |= {"namespace": "default", "uid": "u"}
            parse(body)


def test_conditions_and_their_reasons_are_on_the_autoscaling_page() -> None:
    page = (ROOT / "docs" / "autoscaling.md").read_text()
    for word in (
        *("ScalingActive", "AbleToScale", "ScalingLimited"),
        *("FailedGetMetrics", "NoReadyPods", "ScalingDisabled", "NoDecisionYet", "ValidMetricFound"),
        *("ScaleDownStabilized", "ScaleUpStabilized", "ReplicasOverwritten", "FailedUpdateScale"),
        *("TooManyReplicas", "TooFewReplicas", "ScaleUpLimit", "ScaleDownLimit"),
    ):
        assert f"`{word}`" in page, word


def test_the_operators_page_names_every_flag_reason_and_metric(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "operator.md").read_text()
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    for flag in re.findall(r"--[a-z-]+", capsys.readouterr().out):
        assert flag in page or flag in ("--help", "--version"), flag
    for reason in (
        *("NameConflict", "FieldContested", "InvalidSpec", "InvalidTemplate", "RolloutFailed", "CrashLoop"),
        *("ImagePullFailed", "Unschedulable", "QuotaExceeded", "OutOfMemory", "MetricsUnreachable", "DriftRepaired"),
        *("ModelUnusable", "CacheNotShared", "ChildRefused"),
    ):
        assert f"`{reason}`" in page, reason
    for family in Telemetry().registry.collect():
        assert f"_{family.name.removeprefix('pagefleet_operator_')}" in page, family.name


def test_every_reason_of_the_objective_is_explained() -> None:
    page = (ROOT / "docs" / "autoscaling.md").read_text()
    for reason in OBJECTIVE_MESSAGES:
        assert f"`{reason}`" in page, reason


def rules(path: str, kind: str) -> set[tuple[str, str, str]]:
    (role,) = [
        item
        for item in yaml.safe_load_all((ROOT / "manifests" / path / "rbac.yaml").read_text())
        if item["kind"] == kind
    ]
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_cluster_wide_rights_are_the_namespaced_ones_but_for_leases() -> None:
    namespaced = {rule for rule in rules("base", "Role") if rule[1] != "leases"}
    assert rules("cluster-wide", "ClusterRole") == namespaced


@pytest.mark.parametrize("overlay", ["base", "namespaced", "cluster-wide", "dev"])
def test_overlays_build(overlay: str) -> None:
    kubectl = Path(sys.executable).parent / "kubectl"
    done = subprocess.run(
        [str(kubectl), "kustomize", str(ROOT / "manifests" / overlay)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    kinds = [item["kind"] for item in yaml.safe_load_all(done.stdout)]
    assert ("CustomResourceDefinition" in kinds) is (overlay != "base")
    assert ("ClusterRole" in kinds) is ("--all-namespaces" in done.stdout) is (overlay == "cluster-wide")
