"""`status` of an LLMDeployment, rendered from facts; and when it is worth a write. Pure.

Numbers are quantised: a change below one percent of the blocks is not written, so a resting fleet writes nothing.
Times are only those of transitions, never ages.
"""

import math
from collections.abc import Mapping
from typing import Any

from pagefleet_operator import names
from pagefleet_operator.conditions import Facts, Verdict, judge, phase_of, worst_reason
from pagefleet_operator.errors import SpecError
from pagefleet_operator.fleet import Load, PodState, load_of
from pagefleet_operator.history import History
from pagefleet_operator.memory import remember, two_digits
from pagefleet_operator.model import LLMDeployment, Slo
from pagefleet_operator.rollout import Failure
from pagefleet_operator.times import timestamp

Status = dict[str, Any]

MAX_PODS = 64
"""Rows of status.pods: the oldest, and those that have ended only where there is room."""
MAX_DECISIONS = 10
URGENT = (
    "rollout",
    "observedGeneration",
    "phase",
    "reason",
    "model",
    "replicas",
    "readyReplicas",
    "updatedReplicas",
    "selector",
)
"""Written at once when they change; so are conditions, pod states and the autoscaler's decisions."""


def render(facts: Facts, history: History, decisions: list[Mapping[str, Any]], now: float) -> Status:
    """The whole status. Transition times and quantised numbers are carried over from the last one."""
    llmd, observed = facts.llmd, facts.observed
    verdicts = judge(facts)
    load = load_of(observed.samples.values())
    deployment = observed.children.get("Deployment") or {}
    status: Status = {
        "observedGeneration": llmd.generation,
        "phase": phase_of(facts, verdicts),
        "reason": worst_reason(verdicts),
        "model": llmd.spec.served_name,
        "replicas": len(facts.living),
        "readyReplicas": facts.ready,
        "updatedReplicas": (deployment.get("status") or {}).get("updatedReplicas", 0),
        "selector": names.selector_string(llmd.key.name),
        "ready": f"{facts.ready}/{llmd.spec.replicas}",
        "kvBlocks": _kv_blocks(load, llmd.status.get("kvBlocks")),
        "requests": _requests(load, llmd.status.get("requests")),
        "slo": _slo(facts),
        "pods": _pods(facts, now),
        "conditions": merge_conditions(verdicts, llmd, now),
    }
    status["rollout"] = _rollout(facts)
    if llmd.spec.autoscaling is not None:
        status["autoscaling"] = _autoscaling(facts, history, decisions)
    return status


def _rollout(facts: Facts) -> Status | None:
    """What must be remembered of rollouts; unchanged while nothing is planned."""
    if facts.plan.conflicts or facts.plan.refusal is not None:
        return facts.llmd.status.get("rollout")
    failure, available = facts.plan.failure, facts.plan.available_template
    known = {} if available is None else {"availableTemplateHash": available}
    return known | (render_failure(failure) if failure is not None else {}) or None


def render_failure(failure: Failure) -> Status:
    """What must be remembered of a failed rollout before anything is rolled back."""
    return {"failedTemplateHash": failure.template_hash, "message": failure.message}


def render_invalid(body: Mapping[str, Any], error: SpecError, now: float) -> Status:
    """The status of an object whose spec cannot be honoured: its children are left alone."""
    metadata, last = body["metadata"], body.get("status") or {}
    verdicts = [Verdict("Degraded", True, "InvalidSpec", str(error)[:4096])]
    generation = metadata.get("generation", 0)
    return {
        **last,
        "observedGeneration": generation,
        "phase": "Invalid",
        "reason": "InvalidSpec",
        "conditions": _merge(verdicts, last.get("conditions") or [], generation, now, keep=True),
    }


def merge_conditions(verdicts: list[Verdict], llmd: LLMDeployment, now: float) -> list[Status]:
    """Conditions with their transition times."""
    return _merge(verdicts, llmd.status.get("conditions") or [], llmd.generation, now, keep=False)


def _merge(
    verdicts: list[Verdict], last: list[Mapping[str, Any]], generation: int, now: float, *, keep: bool
) -> list[Status]:
    known = {str(item.get("type")): item for item in last}
    merged: list[Status] = []
    for verdict in verdicts:
        status = "True" if verdict.status else "False"
        before = known.pop(verdict.type, {})
        since = before.get("lastTransitionTime") if before.get("status") == status else None
        merged.append(
            {
                "type": verdict.type,
                "status": status,
                "reason": verdict.reason,
                "message": verdict.message,
                "observedGeneration": generation,
                "lastTransitionTime": since or timestamp(now),
            }
        )
    return merged + ([dict(item) for item in known.values()] if keep else [])


def _kv_blocks(load: Load, last: Mapping[str, Any] | None) -> Status | None:
    percent = load.occupancy_percent
    if percent is None:
        return None
    numbers: Status = {
        "used": load.blocks_used,
        "cached": load.blocks_cached,
        "total": load.blocks_total,
        "waiting": load.blocks_waiting,
        "occupancy": f"{percent}%",
        "summary": f"{load.blocks_used}/{load.blocks_total}",
    }
    if last is not None and _block_key(last) == _block_key(numbers):
        return dict(last)
    return numbers


def _block_key(numbers: Mapping[str, Any]) -> tuple[Any, ...]:
    """Two loads with the same key are the same to a reader: equal to one percent of all blocks, zero apart."""
    total = max(1, numbers.get("total", 1))
    steps = tuple(
        (numbers.get(name, 0) > 0, round(100 * numbers.get(name, 0) / total)) for name in ("used", "cached", "waiting")
    )
    return (numbers.get("total"), numbers.get("occupancy"), *steps)


def _requests(load: Load, last: Mapping[str, Any] | None) -> Status | None:
    if not load.pods:
        return None
    numbers = {"running": load.running, "waiting": load.waiting}
    return dict(last) if last == numbers else numbers


def _slo(facts: Facts) -> Status | None:
    """What requests of the last window saw, to two digits; None when there were none."""
    autoscaling = facts.llmd.spec.autoscaling
    slo = (autoscaling.slo if autoscaling else None) or Slo()
    shown: Status = {}
    shares: list[float] = []
    for name, histogram, target_ms in (
        ("timeToFirstTokenMilliseconds", facts.latencies.time_to_first_token, slo.time_to_first_token_ms),
        ("interTokenLatencyMilliseconds", facts.latencies.inter_token, slo.inter_token_latency_ms),
    ):
        seconds = histogram.quantile(slo.percentile / 100)
        if seconds is not None:
            shown[name] = two_digits(1000 * seconds)
        share = histogram.share_within(target_ms / 1000) if target_ms is not None else None
        if share is not None:
            shares.append(share)
    if shares:
        shown["attainment"] = f"{math.floor(100 * min(shares))}%"
    return shown or None


def _pods(facts: Facts, now: float) -> list[Status]:
    last = {item.get("name"): item for item in facts.llmd.status.get("pods") or []}
    rows: list[Status] = []
    for pod in sorted(facts.observed.pods, key=lambda pod: (pod.finished, pod.created, pod.name))[:MAX_PODS]:
        state = facts.observed.pod_state(pod)
        before = last.get(pod.name, {})
        row: Status = {
            "name": pod.name,
            "state": state.value,
            "since": before.get("since") if before.get("state") == state.value else timestamp(now),
        }
        sample = facts.observed.samples.get(pod.name)
        if sample is not None and state is PodState.READY:
            row["occupancy"] = f"{round(100 * sample.blocks_used / sample.blocks_total)}%"
            row["waiting"] = sample.waiting
        if pod.name in facts.observed.progress:
            row["progress"] = f"Downloading {facts.observed.progress[pod.name]} %"
        rows.append(row)
    return rows


def _autoscaling(facts: Facts, history: History, decisions: list[Mapping[str, Any]]) -> Status:
    decision = facts.decision
    recommended = decision.recommended if decision else facts.llmd.spec.replicas
    status: Status = {
        "desiredReplicas": decision.replicas if decision else facts.llmd.spec.replicas,
        "decisions": [dict(item) for item in decisions[-MAX_DECISIONS:]],
        "history": remember(history, recommended=recommended),
    }
    if decisions:
        status["lastScaleTime"] = decisions[-1]["time"]
    return status


def difference(new: Mapping[str, Any], last: Mapping[str, Any]) -> Status:
    """Merge patch from `last` to `new`: top-level fields that differ, None for those that are gone, at any depth."""
    keys = {*new, *last}
    return {key: _merging(new.get(key), last.get(key)) for key in sorted(keys) if new.get(key) != last.get(key)}


def _merging(new: Any, last: Any) -> Any:
    """What merges into `last` and gives `new`."""
    if not isinstance(new, Mapping) or not isinstance(last, Mapping):
        return new
    gone = dict.fromkeys(key for key in last if key not in new)
    return {key: _merging(value, last.get(key)) for key, value in new.items()} | gone


def is_urgent(patch: Mapping[str, Any], last: Mapping[str, Any]) -> bool:
    """Whether the patch holds more than numbers: conditions, states and replicas are written at once."""
    if any(key in patch for key in URGENT):
        return True
    if "conditions" in patch and _shape(patch["conditions"], "type", "status", "reason") != _shape(
        last.get("conditions"), "type", "status", "reason"
    ):
        return True
    if "pods" in patch and _shape(patch["pods"], "name", "state") != _shape(last.get("pods"), "name", "state"):
        return True
    scaling, before = patch.get("autoscaling") or {}, last.get("autoscaling") or {}
    return "autoscaling" in patch and scaling.get("decisions") != before.get("decisions")


def _shape(items: Any, *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(item.get(key) for key in keys) for item in items or []]
