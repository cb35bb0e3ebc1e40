"""(spec, observed) -> what to do. Pure: the whole reconcile but for reading and writing."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagefleet_operator import builders, names
from pagefleet_operator.fleet import Fleet, FleetPod, PodState, Sample
from pagefleet_operator.model import LLMDeployment
from pagefleet_operator.pods import Pod
from pagefleet_operator.settings import ChildSettings
from pagefleet_operator.victims import choose

Child = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Observed:
    """What the API and the scrapes show of one LLMDeployment."""

    children: Mapping[str, Child] = field(default_factory=dict)
    """Live objects of our name by kind, ours or not."""
    pods: tuple[Pod, ...] = ()
    samples: Mapping[str, Sample] = field(default_factory=dict)
    """Fresh samples by pod name."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Ready pods without a fresh sample whose last scrape failed, by name, with the reason."""

    def pod_state(self, pod: Pod) -> PodState:
        """What a pod does: ready but silent is unreachable."""
        return PodState.UNREACHABLE if pod.state is PodState.READY and pod.name in self.silent else pod.state

    def fleet(self, replicas: int) -> Fleet:
        """The autoscaler's view."""
        return Fleet(
            replicas=replicas,
            pods=tuple(FleetPod(pod.name, self.pod_state(pod), self.samples.get(pod.name)) for pod in self.pods),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What should be so."""

    manifests: tuple[builders.Manifest, ...] = ()
    """Children as they should be, in the order to apply them."""
    costs: Mapping[str, int | None] = field(default_factory=dict)
    """Pod -> pod-deletion-cost to write; None takes it away."""
    waits_for_victims: bool = False
    """The Deployment keeps its replicas until the costs are seen."""
    conflicts: tuple[str, ...] = ()
    """"Kind name" of objects of our name that someone else controls: never touched."""


def plan(llmd: LLMDeployment, observed: Observed, settings: ChildSettings, *, victims_overdue: bool = False) -> Plan:
    """`victims_overdue`: the costs were not seen in time, so shrink without them."""
    conflicts = tuple(
        f"{kind} {llmd.key.name}" for kind, child in observed.children.items() if not is_ours(child, llmd.uid)
    )
    if conflicts:
        return Plan(conflicts=conflicts)
    wanted = llmd.spec.replicas
    current = (observed.children.get("Deployment") or {}).get("spec", {}).get("replicas")
    replicas, costs, waits = wanted, {}, False
    shrink = choose(observed.pods, observed.samples, wanted=wanted)
    if current is not None and wanted < current:
        costs = dict(shrink.costs)
        waits = bool(shrink.costs) and not victims_overdue
        replicas = current if waits else wanted
    elif not shrink.victims:
        costs = dict(shrink.costs)  # a shrink that was taken back
    return Plan(
        manifests=(
            builders.service_account(llmd),
            builders.service(llmd),
            builders.disruption_budget(llmd),
            builders.deployment(llmd, settings, replicas=replicas),
        ),
        costs=costs,
        waits_for_victims=waits,
    )


def is_ours(child: Child, uid: str) -> bool:
    """Whether the LLMDeployment with this uid controls the object."""
    references = child.get("metadata", {}).get("ownerReferences") or []
    return any(reference.get("uid") == uid and reference.get("controller") for reference in references)


@dataclass(frozen=True, slots=True)
class Applied:
    """What we last applied of one child."""

    digest: str
    uid: str
    version: str
    """generation, or resourceVersion of kinds that have none."""


def digest(manifest: builders.Manifest) -> str:
    """Fingerprint of a manifest."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def version_of(child: Child) -> str:
    """What changes when someone edits the child's spec."""
    metadata = child.get("metadata", {})
    generation = metadata.get("generation")
    return f"g{generation}" if generation else f"r{metadata.get('resourceVersion', '')}"


def needs_apply(manifest: builders.Manifest, live: Child | None, applied: Applied | None) -> bool:
    """Whether the child must be applied: it is new, wanted otherwise, was edited, or lost a label of ours."""
    if live is None or applied is None or applied.digest != digest(manifest):
        return True
    metadata = live.get("metadata", {})
    if applied.uid != metadata.get("uid"):
        return True
    have, want = metadata.get("labels") or {}, manifest["metadata"]["labels"]
    if any(have.get(key) != value for key, value in want.items()):
        return True
    return applied.version != version_of(live) and not _is_older(live, applied)


def _is_older(live: Child, applied: Applied) -> bool:
    """Our watch may still show the child as it was before our own write."""
    seen, known = version_of(live), applied.version
    return seen[:1] == known[:1] and seen[1:].isdigit() and known[1:].isdigit() and int(seen[1:]) < int(known[1:])


def managers_of(child: Child) -> list[str]:
    """Names of others who hold fields of the child's spec, the latest writer first: for messages."""
    entries = child.get("metadata", {}).get("managedFields") or []
    others = [
        entry
        for entry in entries
        if entry.get("manager") != names.FIELD_MANAGER
        and entry.get("subresource") != "status"
        and "f:spec" in (entry.get("fieldsV1") or {})
    ]
    latest_first = sorted(others, key=lambda entry: str(entry.get("time", "")), reverse=True)
    return list(dict.fromkeys(str(entry.get("manager")) for entry in latest_first))
