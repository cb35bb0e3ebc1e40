"""Conditions from an ordered list of pure checks: the first that applies names the reason. Pure."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagefleet_operator.autoscale import Decision
from pagefleet_operator.errors import shorten
from pagefleet_operator.latency import Latencies
from pagefleet_operator.model import LLMDeployment
from pagefleet_operator.plan import Observed, Plan
from pagefleet_operator.pods import Pod


@dataclass(frozen=True, slots=True)
class Verdict:
    """One condition, its time apart."""

    type: str
    status: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Facts:
    """All that conditions are judged from."""

    llmd: LLMDeployment
    observed: Observed
    plan: Plan
    decision: Decision | None = None
    """The last one; None without autoscaling or before the first scrape round."""
    latencies: Latencies = field(default_factory=Latencies)
    """What requests of the last window saw."""
    overwritten: str | None = None
    """What the last decision overwrote: a manual change of spec.replicas."""
    apply_failure: tuple[str, str] | None = None
    """(reason, message) of a child that the API refused."""
    scale_failure: str | None = None
    """Why the last write of spec.replicas failed."""
    contested: str | None = None
    """Which child someone keeps changing back, and who."""

    @property
    def living(self) -> tuple[Pod, ...]:
        """Pods that are not leaving."""
        return tuple(pod for pod in self.observed.pods if not pod.terminating and not pod.finished)

    @property
    def ready(self) -> int:
        """Pods that answer requests."""
        return sum(pod.ready for pod in self.living)


def judge(facts: Facts) -> list[Verdict]:
    """Every condition, in the order of `status.conditions`."""
    verdicts = [_available(facts), _progressing(facts), _degraded(facts)]
    if facts.llmd.spec.autoscaling is not None:
        scaling = [_scaling_active(facts), _able_to_scale(facts), _scaling_limited(facts)]
        if facts.llmd.spec.autoscaling.slo is not None:
            scaling.append(_slo_met(facts))
        verdicts += scaling if facts.decision is not None else [_as_last_said(facts, verdict) for verdict in scaling]
    return verdicts


UNDECIDED = frozenset({"NoDecisionYet", "ReadyForNewScale", "DesiredWithinRange", "TooFewSamples"})
"""Reasons of what is not known before the first decision."""


def _as_last_said(facts: Facts, verdict: Verdict) -> Verdict:
    """Until an operator has decided for the first time, what the one before it said holds."""
    known = next((item for item in facts.llmd.status.get("conditions") or [] if item.get("type") == verdict.type), None)
    if known is None or verdict.reason not in UNDECIDED:
        return verdict
    reason, message = str(known.get("reason") or verdict.reason), str(known.get("message") or verdict.message)
    return Verdict(verdict.type, known.get("status") == "True", reason, message)


def _available(facts: Facts) -> Verdict:
    ready, wanted = facts.ready, facts.llmd.spec.replicas
    if ready:
        return Verdict("Available", True, "ReplicasReady", f"{ready} of {wanted} replicas are ready")
    if wanted == 0:
        return Verdict("Available", False, "ScaledToZero", "spec.replicas is 0: raise it to serve the model")
    if facts.plan.conflicts:
        return Verdict("Available", False, "NameConflict", "no replica was started")
    return Verdict("Available", False, "NoReadyReplicas", f"none of {wanted} replicas is ready")


def _progressing(facts: Facts) -> Verdict:
    wanted, living = facts.llmd.spec.replicas, len(facts.living)
    status = (facts.observed.children.get("Deployment") or {}).get("status") or {}
    updated = status.get("updatedReplicas", 0)
    if facts.plan.waits_for_victims:
        return Verdict("Progressing", True, "ChoosingVictims", f"{living} replicas are to become {wanted}")
    if living > wanted:
        return Verdict("Progressing", True, "ScalingDown", f"{living} replicas are to become {wanted}")
    if living < wanted and status:
        return Verdict("Progressing", True, "ScalingUp", f"{living} replicas are to become {wanted}")
    progress = facts.observed.progress.values()
    if progress:
        message = f"{facts.ready} of {wanted} replicas are ready, {len(progress)} download the model: {min(progress)} %"
        return Verdict("Progressing", True, "Downloading", message)
    if updated < wanted:
        return Verdict("Progressing", True, "RollingOut", f"{updated} of {wanted} replicas run the newest template")
    if facts.ready < wanted:
        return Verdict("Progressing", True, "Starting", f"{facts.ready} of {wanted} replicas are ready")
    return Verdict("Progressing", False, "Complete", "everything is as the spec wants it")


REMEDIES = {
    "ApplyFailed": "it is tried again: see the operator's log",
    "ChildRefused": "undo the change that it names",
    "ContainerConfigError": "create what is missing, or correct the reference to it",
    "CrashLoop": "see kubectl logs --previous",
    "Forbidden": "apply the RBAC of this release",
    "ImagePullFailed": "correct engine.image, or set imagePullSecrets in spec.template",
    "InvalidTemplate": "correct spec.template",
    "MetricsUnreachable": "let the operator reach port 8000 of the pods, or see the pod's log",
    "QuotaExceeded": "raise the quota, or lower the replicas",
    "ReplicaFailure": "change what refuses the pods",
    "Unschedulable": "free or add nodes that fit, or change resources, engine.accelerator or spec.template",
}
"""What to do, where the message is somebody else's text; the other reasons' messages say it themselves."""


def _degraded(facts: Facts) -> Verdict:
    for check in DEGRADED_CHECKS:
        for reason, message in check(facts):
            return Verdict("Degraded", True, reason, "; ".join(filter(None, (message, REMEDIES.get(reason)))))
    return Verdict("Degraded", False, "AsExpected", "nothing is wrong")


def _conflict(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.plan.conflicts:
        yield (
            "NameConflict",
            f"{', '.join(facts.plan.conflicts)} exists and belongs to someone else: "
            "delete it, or create the LLMDeployment under another name",
        )


def _refused(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.apply_failure is not None:
        yield facts.apply_failure


def _refused_here(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.plan.refusal is not None:
        yield facts.plan.refusal


def _rolled_back(facts: Facts) -> Iterator[tuple[str, str]]:
    failure = facts.plan.failure
    if failure is not None:
        yield (
            "RolloutFailed",
            f"template {failure.template_hash} failed: {failure.message}; the replicas run the one before: "
            "change the spec to try again",
        )


def _contested(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.contested is not None:
        yield "FieldContested", facts.contested


def _replica_failure(facts: Facts) -> Iterator[tuple[str, str]]:
    for condition in _deployment_conditions(facts):
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            text = shorten(condition.get("message") or "pods cannot be created")
            yield ("QuotaExceeded" if "exceeded quota" in text else "ReplicaFailure"), text


def _pod_trouble(facts: Facts) -> Iterator[tuple[str, str]]:
    for pod in facts.living:
        if pod.trouble is not None and not pod.ready:
            yield pod.trouble.reason, f"pod {pod.name}: {pod.trouble.message}"


def _deadline(facts: Facts) -> Iterator[tuple[str, str]]:
    for condition in _deployment_conditions(facts):
        if condition.get("type") == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded":
            limit = facts.llmd.spec.startup_timeout_seconds
            yield (
                "RolloutStalled",
                f"a new replica did not become ready in {limit} s: see its log, or raise startup.timeoutSeconds",
            )


def _silent(facts: Facts) -> Iterator[tuple[str, str]]:
    for name, why in facts.observed.silent.items():
        yield "MetricsUnreachable", f"pod {name} is ready but gives no load: {why}"


DEGRADED_CHECKS: tuple[Callable[[Facts], Iterator[tuple[str, str]]], ...] = (
    _conflict,
    _refused_here,
    _refused,
    _rolled_back,
    _contested,
    _replica_failure,
    _pod_trouble,
    _deadline,
    _silent,
)
"""Worst first."""


def _deployment_conditions(facts: Facts) -> list[Mapping[str, Any]]:
    child = facts.observed.children.get("Deployment") or {}
    return list((child.get("status") or {}).get("conditions") or [])


def _scaling_active(facts: Facts) -> Verdict:
    decision = facts.decision
    if decision is None:
        return Verdict("ScalingActive", False, "NoDecisionYet", "no scrape round has ended since the operator started")
    if decision.active:
        return Verdict("ScalingActive", True, "ValidMetricFound", "replicas follow KV-cache blocks and queue")
    return Verdict("ScalingActive", False, decision.reason, decision.message)


def _able_to_scale(facts: Facts) -> Verdict:
    if facts.scale_failure is not None:
        return Verdict("AbleToScale", False, "FailedUpdateScale", facts.scale_failure)
    for reason, text in _replica_failure(facts):
        return Verdict("AbleToScale", False, reason, text)
    limited = facts.decision.limited_by if facts.decision else None
    if facts.llmd.spec.autoscaling is not None and facts.llmd.spec.autoscaling.mode == "DryRun":
        return Verdict("AbleToScale", False, "DryRun", "mode DryRun: status.autoscaling says what would be done")
    if facts.overwritten is not None:
        return Verdict("AbleToScale", True, "ReplicasOverwritten", facts.overwritten)
    if limited in ("ScaleDownStabilized", "ScaleUpStabilized"):
        return Verdict("AbleToScale", True, limited, "a past recommendation of the stabilisation window still counts")
    return Verdict("AbleToScale", True, "ReadyForNewScale", "spec.replicas can be changed")


LIMITS = {
    "TooManyReplicas": "more replicas are needed than autoscaling.maxReplicas allows",
    "TooFewReplicas": "autoscaling.minReplicas keeps more replicas than the load needs",
    "ScaleUpLimit": "the policies of behavior.scaleUp slow the growth",
    "DeviceBudget": "the namespace's budget of devices has no room: others hold them, or need them more",
    "ScaleDownLimit": "the policies of behavior.scaleDown slow the shrinking",
}


def _scaling_limited(facts: Facts) -> Verdict:
    limited = facts.decision.limited_by if facts.decision else None
    if limited in LIMITS:
        return Verdict("ScalingLimited", True, str(limited), LIMITS[str(limited)])
    return Verdict("ScalingLimited", False, "DesiredWithinRange", "the load's own count is within the bounds")


OBJECTIVE_MESSAGES = {
    "ObjectiveMet": "requests are as fast as the objective wants",
    "ObjectiveMissed": "requests are slower than the objective, and replicas are full: more are asked for",
    "ObjectiveNotCapacityBound": "requests are slower than the objective although replicas have room: "
    "more of them would not help; use faster hardware, shorter prompts or a wider objective",
    "Settling": "replicas have just changed: their latencies are not judged yet",
    "TooFewSamples": "too few requests to judge",
}


def _slo_met(facts: Facts) -> Verdict:
    verdict = facts.decision.inputs.objective if facts.decision else None
    if verdict is None:
        return Verdict("SLOMet", True, "TooFewSamples", OBJECTIVE_MESSAGES["TooFewSamples"])
    return Verdict("SLOMet", verdict.met, verdict.reason, OBJECTIVE_MESSAGES[verdict.reason])


def phase_of(facts: Facts, verdicts: list[Verdict]) -> str:
    """One word for `status.phase`."""
    holds = {verdict.type for verdict in verdicts if verdict.status}
    if "Degraded" in holds:
        return "Degraded"
    if facts.llmd.spec.replicas == 0:
        return "Stopped"
    if facts.observed.children.get("Deployment") is None:
        return "Pending"
    if "Available" not in holds:
        return "Starting"
    return "Scaling" if "Progressing" in holds else "Available"


def worst_reason(verdicts: list[Verdict]) -> str:
    """Reason of the condition that matters most."""
    by_type = {verdict.type: verdict for verdict in verdicts}
    if by_type["Degraded"].status:
        return by_type["Degraded"].reason
    if not by_type["Available"].status:
        return by_type["Available"].reason
    for name, good in (("ScalingActive", True), ("AbleToScale", True), ("ScalingLimited", False), ("SLOMet", True)):
        verdict = by_type.get(name)
        if verdict is not None and verdict.status is not good and verdict.reason != "TooFewReplicas":
            return verdict.reason
    return by_type["Progressing"].reason if by_type["Progressing"].status else by_type["Available"].reason
