"""What is shipped: the objects of a kustomization, and what the operator makes of an LLMDeployment."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from pagefleet_operator import builders
from pagefleet_operator.model import LLMDeployment
from pagefleet_operator.settings import ChildSettings

ROOT = Path(__file__).resolve().parents[2]


def kustomized(overlay: str) -> list[dict[str, Any]]:
    """All objects of `manifests/OVERLAY`, as kubectl makes them."""
    kubectl = Path(sys.executable).parent / "kubectl"
    command = [str(kubectl), "kustomize", str(ROOT / "manifests" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return list(yaml.safe_load_all(done.stdout))


def children_of(llmd: LLMDeployment) -> list[dict[str, Any]]:
    """Its children of Kubernetes' own kinds."""
    settings = ChildSettings()
    children = [
        builders.deployment(llmd, settings, replicas=2),
        builders.service(llmd),
        builders.service_account(llmd),
        builders.disruption_budget(llmd),
        builders.network_policy(llmd, settings),
    ]
    if llmd.spec.cache is not None:
        children.append(builders.cache_claim(llmd, llmd.spec.cache))
    return children
