"""(spec, observed) -> what to do. Pure: the whole reconcile but for reading and writing."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from pagefleet_operator import builders, names, rollout
from pagefleet_operator.drift import Child
from pagefleet_operator.fleet import Fleet, FleetPod, PodState, Sample
from pagefleet_operator.latency import Latencies
from pagefleet_operator.model import LLMDeployment
from pagefleet_operator.parsing import is_shared, not_shared
from pagefleet_operator.pods import Pod
from pagefleet_operator.resources import EVERY_CHILD, POD_MONITOR, REMOVABLE
from pagefleet_operator.rollout import Failure
from pagefleet_operator.settings import ChildSettings
from pagefleet_operator.template import refused_fields
from pagefleet_operator.victims import choose


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
    replica_sets: tuple[Child, ...] = ()
    progress: Mapping[str, int] = field(default_factory=dict)
    """Percent of the model that pods have downloaded, by name, while they do."""
    has_pod_monitors: bool = False
    """Whether the cluster has that kind."""
    cache_claim: Child | None = None
    """The claim that model.cache.claimName names."""

    def pod_state(self, pod: Pod) -> PodState:
        """What a pod does: ready but silent is unreachable."""
        return PodState.UNREACHABLE if pod.state is PodState.READY and pod.name in self.silent else pod.state

    def fleet(self, replicas: int, latencies: Latencies, watched_starts: Container[str] = ()) -> Fleet:
        """The autoscaler's view.

        `latencies` are those of the last window. Start-up times are given for the pods of `watched_starts` only: the
        ready time of a pod that we did not see starting may be that of a later return.
        """
        return Fleet(
            replicas=replicas,
            pods=tuple(
                FleetPod(
                    pod.name,
                    self.pod_state(pod),
                    self.samples.get(pod.name),
                    pod.start_seconds if pod.name in watched_starts else None,
                )
                for pod in self.pods
                if not pod.finished  # evicted ones may lie about for days, and another is made for each
            ),
            latencies=latencies,
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
    failure: Failure | None = None
    """The wanted template failed: the Deployment goes back to the one before."""
    available_template: str | None = None
    """Hash of the last pod template whose replicas were all ready."""
    conflicts: tuple[str, ...] = ()
    """"Kind name" of objects of our name that are not ours: never touched."""
    removals: tuple[str, ...] = ()
    """Kinds of children that the spec no longer wants."""
    refusal: tuple[str, str] | None = None
    """(reason, message) of a spec that cannot run here: the children are left as they are."""


def plan(
    llmd: LLMDeployment,
    observed: Observed,
    settings: ChildSettings,
    *,
    applied_replicas: int | None = None,
    victims_overdue: bool = False,
) -> Plan:
    """What should be so.

    `applied_replicas`: what the Deployment was last told by us; beyond it someone else scaled it, and that is put right
    at once. `victims_overdue`: the costs were not seen in time, so shrink without them.
    """
    conflicts = tuple(
        f"{kind} {llmd.key.name}" for kind, child in observed.children.items() if not is_ours(child, llmd)
    )
    if conflicts:
        return Plan(conflicts=conflicts)
    refusal = _refusal(llmd, observed, settings)
    if refusal is not None:
        return Plan(refusal=refusal)
    wanted = llmd.spec.replicas
    current = (observed.children.get("Deployment") or {}).get("spec", {}).get("replicas")
    if current is not None and applied_replicas is not None:
        current = min(current, applied_replicas)
    replicas, costs, waits = wanted, {}, False
    shrink = choose(observed.pods, observed.samples, wanted=wanted)
    if current is not None and wanted < current:
        costs = dict(shrink.costs)
        waits = bool(shrink.costs) and not victims_overdue
        replicas = current if waits else wanted
    elif not shrink.victims:
        costs = dict(shrink.costs)  # a shrink that was taken back
    deployment, failure = _deployment(llmd, observed, builders.deployment(llmd, settings, replicas=replicas))
    return Plan(
        manifests=(
            builders.service_account(llmd),
            builders.service(llmd),
            builders.disruption_budget(llmd),
            *_optional(llmd, observed, settings),
            deployment,
        ),
        removals=_removals(llmd, observed),
        costs=costs,
        waits_for_victims=waits,
        failure=failure,
        available_template=rollout.available(past(llmd), observed.children.get("Deployment"), observed.replica_sets),
    )


def kinds_of(llmd: LLMDeployment, *, has_pod_monitors: bool) -> tuple[str, ...]:
    """Kinds of the children that the spec wants, in the order to apply them."""
    cache = llmd.spec.cache
    wanted = {
        "PersistentVolumeClaim": cache is not None and cache.claim is None,
        "NetworkPolicy": llmd.spec.network_policy.restricted,
        POD_MONITOR: llmd.spec.pod_monitor and has_pod_monitors,
    }
    return tuple(kind for kind in EVERY_CHILD if wanted.get(kind, True))


def _removals(llmd: LLMDeployment, observed: Observed) -> tuple[str, ...]:
    wanted = kinds_of(llmd, has_pod_monitors=observed.has_pod_monitors)
    return tuple(kind for kind in REMOVABLE if kind in observed.children and kind not in wanted)


def _optional(llmd: LLMDeployment, observed: Observed, settings: ChildSettings) -> list[builders.Manifest]:
    kinds = kinds_of(llmd, has_pod_monitors=observed.has_pod_monitors)
    manifests: list[builders.Manifest] = []
    if "PersistentVolumeClaim" in kinds and llmd.spec.cache is not None:
        manifests.append(builders.cache_claim(llmd, llmd.spec.cache))
    if "NetworkPolicy" in kinds:
        manifests.append(builders.network_policy(llmd, settings))
    if POD_MONITOR in kinds:
        manifests.append(builders.pod_monitor(llmd))
    return manifests


def _refusal(llmd: LLMDeployment, observed: Observed, settings: ChildSettings) -> tuple[str, str] | None:
    allowed = settings.allowed_template_fields
    refused = refused_fields(llmd.spec.template, allowed) if allowed is not None else []
    if refused:
        return (
            "InvalidTemplate",
            f"this operator does not let users set {', '.join(f'spec.template.{path}' for path in refused[:8])}: "
            f"take it out; allowed are {', '.join(allowed or ()) or 'none'}",
        )
    claim, pods = observed.cache_claim, llmd.spec.most_pods
    modes = ((claim or {}).get("spec") or {}).get("accessModes") or []
    if modes and not is_shared(modes, pods):
        name = llmd.spec.cache.claim if llmd.spec.cache is not None else ""
        return (
            "CacheNotShared",
            f"the claim {name} of model.cache.claimName has {', '.join(modes)}: it {not_shared(pods)}",
        )
    return None


def _deployment(
    llmd: LLMDeployment, observed: Observed, manifest: builders.Manifest
) -> tuple[builders.Manifest, Failure | None]:
    """The wanted Deployment, or the one to go back to and why."""
    wanted = rollout.template_hash(manifest)
    before, live = past(llmd), observed.children.get("Deployment")
    failure = rollout.judge(wanted, before, live, observed.replica_sets, observed.pods)
    good = rollout.go_back_to(wanted, before, observed.replica_sets) if failure is not None else None
    if failure is None or good is None:
        return rollout.stamped(manifest, wanted), None
    return rollout.rolled_back(manifest, good), failure


def past(llmd: LLMDeployment) -> rollout.Past:
    """What the status remembers of rollouts."""
    known = llmd.status.get("rollout") or {}
    failed = known.get("failedTemplateHash")
    failure = Failure(failed, known.get("message", "")) if failed else None
    return rollout.Past(failure, known.get("availableTemplateHash"))


def is_ours(child: Child, llmd: LLMDeployment) -> bool:
    """Whether the LLMDeployment controls the object, or may: it carries our labels and nobody controls it.

    So are children whose owner was deleted with `--cascade=orphan`, or whose ownerReferences somebody took away.
    """
    metadata = child.get("metadata", {})
    controller = next((item for item in metadata.get("ownerReferences") or [] if item.get("controller")), None)
    if controller is not None:
        return bool(controller.get("uid") == llmd.uid)
    found = metadata.get("labels") or {}
    return all(found.get(label) == value for label, value in names.labels(llmd.key.name).items())
