"""Why a deployment has as many replicas as it has, in sentences. Pure."""

from collections.abc import Sequence
from datetime import datetime

from pagefleet_plugin.deployment import Condition, Decision, Deployment

RULES = {
    "KVBlocks": "the KV-cache blocks in use, and those that the queue will need",
    "Queue": "the requests that run and wait",
    "Objective": "the latency objective, missed while replicas were full",
    "Standing": "what load has done before: this many replicas must be ready for its next jump",
    "WithinTolerance": "nothing: the load fits the replicas that there were",
}
"""Rules of the autoscaler: reason → what it looked at."""
LIMITS = ("AbleToScale", "ScalingLimited", "ScalingActive")
"""Conditions that hold the replicas back when they have another status or reason than in the quiet case."""
QUIET = {"ReadyForNewScale", "DesiredWithinRange", "ValidMetricFound"}


def explain(found: Deployment, *, now: datetime, decisions: int = 5) -> list[str]:
    """Sentences, most important first: how many, since when, why, what holds it back, what is wrong."""
    lines = [_how_many(found)]
    lines += _load(found)
    lines += _last(found.decisions, now, decisions)
    lines += [_held(condition) for condition in map(found.condition, LIMITS) if condition and _holds_back(condition)]
    lines += _objective(found)
    lines += _troubles(found)
    return lines


def _how_many(found: Deployment) -> str:
    wanted = "an unknown number of" if found.wanted is None else str(found.wanted)
    text = (
        f"{found.namespace}/{found.name} wants {wanted} replica{'' if found.wanted == 1 else 's'}; {found.ready} ready."
    )
    if found.limits is None:
        return text + " Nothing scales it here: spec.replicas stays as it is written (by you, an HPA or KEDA)."
    low, high = found.limits
    text += f" The autoscaler may choose {low} to {high}."
    if found.mode == "DryRun":
        text += f" mode is DryRun: it would choose {found.desired}, and changes nothing."
    return text


def _load(found: Deployment) -> list[str]:
    if not found.blocks.total:
        return ["No ready replica reports its load yet."]
    blocks = found.blocks
    return [
        f"Now: {blocks.used} of {blocks.total} blocks in use ({blocks.occupancy:.0%}), {blocks.waiting} more needed by"
        f" {found.waiting} waiting requests, {found.running} running."
    ]


def _last(made: Sequence[Decision], now: datetime, count: int) -> list[str]:
    if not made:
        return ["The autoscaler has not changed the replicas since this object was made."]
    lines = []
    for position, decision in enumerate(reversed(made[-count:])):
        rule, _, limit = decision.reason.partition(", limited by ")
        when = _ago(decision.time, now)
        verb = "Last change" if position == 0 else "Before that"
        cause = RULES.get(rule, rule)
        line = f"{verb}, {when}: {decision.before} → {decision.after}, because of {cause}"
        line += f" (limited by {limit})" if limit else ""
        lines.append(f"{line}. {decision.inputs}".rstrip())
    return lines


def _holds_back(condition: Condition) -> bool:
    return condition.reason not in QUIET


def _held(condition: Condition) -> str:
    return f"{condition.kind} is {condition.status}, {condition.reason}: {condition.message}"


def _objective(found: Deployment) -> list[str]:
    condition = found.condition("SLOMet")
    return [f"Objective: {condition.reason}. {condition.message}"] if condition else []


def _troubles(found: Deployment) -> list[str]:
    lines = [
        f"Trouble: {condition.reason}: {condition.message}"
        for condition in found.conditions
        if (condition.kind, condition.status) in (("Degraded", "True"), ("Available", "False"))
    ]
    if found.failed_rollout:
        lines.append(f"Trouble: the last rollout failed and was taken back: {found.failed_rollout}")
    return lines


def _ago(moment: datetime | None, now: datetime) -> str:
    if moment is None:
        return "at an unknown time"
    seconds = max(0, int((now - moment).total_seconds()))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"
