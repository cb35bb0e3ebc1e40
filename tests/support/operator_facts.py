"""What is known of an LLMDeployment when its status is made, with defaults."""

from typing import Any

from pagefleet_operator import builders
from pagefleet_operator.conditions import Facts
from pagefleet_operator.plan import Observed, Plan
from pagefleet_operator.pods import parse_pod
from pagefleet_operator.settings import ChildSettings
from support.operator_objects import llmd

NOW = 1_800_000_000.0


def deployment(
    replicas: int = 1, *, updated: int | None = None, conditions: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    manifest = builders.deployment(llmd(), ChildSettings(server_image="i"), replicas=replicas)
    status = {"updatedReplicas": replicas if updated is None else updated, "conditions": conditions or []}
    return {**manifest, "status": status}


def facts(
    *bodies: dict[str, Any],
    spec: dict[str, Any] | None = None,
    child: dict[str, Any] | None = None,
    samples: dict[str, Any] | None = None,
    silent: dict[str, str] | None = None,
    status: dict[str, Any] | None = None,
    progress: dict[str, int] | None = None,
    **fields: Any,
) -> Facts:
    made = llmd(spec=spec or {}, status=status)
    observed = Observed(
        children={"Deployment": child or deployment(made.spec.replicas)},
        pods=tuple(parse_pod(body) for body in bodies),
        samples=samples or {},
        silent=silent or {},
        progress=progress or {},
    )
    return Facts(llmd=made, observed=observed, plan=fields.pop("plan", Plan()), **fields)
