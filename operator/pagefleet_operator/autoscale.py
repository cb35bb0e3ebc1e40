"""The scaling decision: a pure function of (spec, fleet, history, now). No I/O, no clock, no globals.

Demand is counted in KV-cache blocks: those in use plus those that the waiting requests will need. Occupancy alone
saturates at 100 % and could ask for no more than 1/target times the replicas; counting the queue's blocks asks for
what is needed in one step, and their trend says what will be needed when a new replica is ready. Replicas that are
starting count as capacity, because demand is compared with the wanted replicas and not with the ready ones.

What is unknown is bounded on the safe side, as in autoscaling/v2: a silent pod counts as idle when the question is
whether to grow, and as full when the question is whether to shrink.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from pagefleet_operator import forecast
from pagefleet_operator.behavior import limit_rate, stabilize
from pagefleet_operator.demand import demand_of, is_balanced, turnover_seconds
from pagefleet_operator.fleet import Fleet, Load, Sample, load_of
from pagefleet_operator.history import History
from pagefleet_operator.model import AutoscalingSpec
from pagefleet_operator.objective import Verdict, judge
from pagefleet_operator.standing import LATE_SECONDS

TOLERANCE = 0.1
"""Nothing changes while demand is within this part of the target, as in the horizontal pod autoscaler."""

SHRINK_MARGIN = 0.8
"""Replicas go only when what remains would then be filled to this part of the target at most."""

OBJECTIVE = "Objective"
STANDING = "Standing"
"""The rule for what load has done before; the others ask for what it needs."""

SETTLED_QUEUE_SECONDS = 0.5
"""A request that waits longer is no longer just on its way into the engine."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The numbers of one decision."""

    load: Load = field(default_factory=Load)
    missing_pods: int = 0
    blocks: float = 0.0
    """Demand that counts: smoothed, an old backlog only in part."""
    requests: float = 0.0
    """The same in requests."""
    capacity_blocks: float = 0.0
    """Blocks of one replica times the target."""
    capacity_requests: float | None = None
    """Requests that one replica may run and queue; None until a queue was seen."""
    projected_blocks: float = 0.0
    """Demand when a replica ordered now would be ready."""
    start_seconds: float = 0.0
    """How long that takes."""
    objective: Verdict | None = None
    """None without an objective."""
    standing: int = 1
    """Replicas that must stand ready for what load has done before; 1 without an objective."""
    wants: Mapping[str, int] = field(default_factory=dict)
    """Replicas that each rule asks for; the highest wins."""

    def __str__(self) -> str:
        load = self.load
        text = (
            f"demand {self.blocks:.0f} blocks (now {load.blocks_used} used + {load.blocks_waiting} waiting), "
            f"{self.capacity_blocks:.0f} per replica at target; {load.running} running, {load.waiting} waiting; "
            f"{load.pods} pods sampled"
        )
        if self.missing_pods:
            text += f", {self.missing_pods} silent"
        if round(self.projected_blocks) > round(self.blocks):
            text += f"; rising to {self.projected_blocks:.0f} blocks within {self.start_seconds:.0f} s"
        if self.objective is not None and self.objective.ratio is not None:
            text += f"; latency {100 * self.objective.ratio:.0f} % of the objective"
        if self.wants:
            text += "; wanted: " + ", ".join(f"{rule} {replicas}" for rule, replicas in self.wants.items())
        return text


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do and why."""

    replicas: int
    """The wanted count from now on."""
    recommended: int
    """What the load alone asks for, before windows, policies, bounds and budget."""
    unbudgeted: int
    """What `replicas` would be without a budget of devices."""
    needed: int
    """What of that load needs or needed within the scale-down window; the rest stands ready for a jump."""
    active: bool
    """Whether the load could be judged: condition ScalingActive."""
    reason: str
    """One word for the rule that won; also where it keeps replicas that demand would give back."""
    message: str
    """The same in a sentence."""
    limited_by: str | None
    """The last of window, policies, bounds and budget that moved the count on its way from `recommended` to `replicas`;
    None when none did."""
    inputs: Inputs
    history: History
    """The memory to hand to the next decision."""


def decide(
    spec: AutoscalingSpec, fleet: Fleet, history: History, now: float, *, allowance: int | None = None
) -> Decision:
    """Decide the wanted replicas. `now` is seconds on the clock of samples and history.

    `allowance`: replicas that the budget of devices leaves for this deployment (budget.py); None: no budget.
    """
    current = fleet.replicas
    load = load_of(pod.sample for pod in fleet.sampled if pod.sample is not None)
    if current == 0:
        why = "spec.replicas is 0: scaling is off until it is not"
        return _inactive(_Bounded(0, 0), current, load, history, "ScalingDisabled", why)
    if load.pods == 0:
        why = "no ready pod answers with metrics" if fleet.missing else "no pod is ready yet"
        bounded = _bound(spec, current, allowance)
        reason = "FailedGetMetrics" if fleet.missing else "NoReadyPods"
        return _inactive(bounded, current, load, history, reason, why + ": the replicas stay as they are")

    history = _learn(fleet, load, history, now)
    inputs = _inputs(spec, fleet, load, history, now)
    inputs = replace(inputs, wants=_wants(fleet, inputs))
    history = _learn_standing(spec, fleet, inputs, history, now)
    recommended, reason = _recommend(fleet, inputs)
    needed, _ = _recommend(fleet, replace(inputs, wants={k: v for k, v in inputs.wants.items() if k != STANDING}))

    down = float(spec.scale_down.stabilization_window_seconds)
    window = max(down, float(spec.scale_up.stabilization_window_seconds))
    history = history.resumed(current, now=now)
    history = history.recommended(recommended, now=now, window_seconds=window, needed=needed)
    stable, window_limit = stabilize(spec, recommended, current, history, now)
    paced, rate_limit = limit_rate(spec, stable, current, history, now)
    bounded = _bound(spec, paced, allowance)
    lately = history.max_needed_since(now, window_seconds=down, bucket_window_seconds=window)
    return Decision(
        replicas=bounded.replicas,
        recommended=recommended,
        unbudgeted=bounded.unbudgeted,
        needed=min(bounded.unbudgeted, max(needed, lately or 0, spec.min_replicas)),
        active=True,
        reason=reason,
        message=str(inputs),
        limited_by=bounded.limited_by or rate_limit or window_limit,
        inputs=inputs,
        history=history,
    )


@dataclass(frozen=True, slots=True)
class _Bounded:
    replicas: int
    unbudgeted: int
    limited_by: str | None = None


def _bound(spec: AutoscalingSpec, wanted: int, allowance: int | None) -> _Bounded:
    """Within minReplicas and maxReplicas, then the budget, but at least 1: 0 would switch scaling off."""
    bounded = min(max(wanted, spec.min_replicas), spec.max_replicas)
    limited_by = "TooManyReplicas" if bounded < wanted else "TooFewReplicas" if bounded > wanted else None
    if allowance is not None and bounded > max(1, allowance):
        return _Bounded(max(1, allowance), bounded, "DeviceBudget")
    return _Bounded(bounded, bounded, limited_by)


def _inactive(bounded: _Bounded, current: int, load: Load, history: History, reason: str, message: str) -> Decision:
    return Decision(
        replicas=bounded.replicas,
        recommended=current,
        unbudgeted=bounded.unbudgeted,
        needed=bounded.unbudgeted,
        active=False,
        reason=reason,
        message=message,
        limited_by=bounded.limited_by,
        inputs=Inputs(load=load),
        history=history,
    )


def _learn(fleet: Fleet, load: Load, history: History, now: float) -> History:
    samples = [pod.sample for pod in fleet.sampled if pod.sample is not None]
    saturated = [sample.running for sample in samples if sample.running > 0 and _is_queueing(sample)]
    if saturated:
        history = history.saturated_at(sum(saturated) / len(saturated))
    history = history.ran(max(sample.running for sample in samples))
    seen = turnover_seconds(load.running, fleet.latencies)
    if seen is not None and is_balanced(samples):
        history = history.turned_over(seen)
    known = history.turnover_seconds
    history = history.demanded(demand_of(samples, seen if known is None else known, now))
    history = history.started((pod.name, pod.start_seconds) for pod in fleet.pods if pod.start_seconds is not None)
    return replace(history, unsettled_at=now) if fleet.starting else history


def _learn_standing(spec: AutoscalingSpec, fleet: Fleet, inputs: Inputs, history: History, now: float) -> History:
    """Only with an objective: without one nothing says what may be late. A fleet with silent pods teaches nothing."""
    if spec.slo is None or fleet.missing:
        return history
    first_token_ms = spec.slo.time_to_first_token_ms
    standing = history.standing.observed(
        history.demand[-1].demand / inputs.capacity_blocks,
        inputs.projected_blocks / inputs.capacity_blocks,
        now=now,
        start_seconds=inputs.start_seconds,
        window_seconds=float(spec.scale_down.stabilization_window_seconds),
        late_seconds=LATE_SECONDS if first_token_ms is None else first_token_ms / 1000,
        allowed=1 - spec.slo.percentile / 100,
        most=spec.max_replicas,
    )
    return replace(history, standing=standing)


def _is_queueing(sample: Sample) -> bool:
    return sample.waiting > 0 and sample.oldest_waiting_seconds >= SETTLED_QUEUE_SECONDS


def _inputs(spec: AutoscalingSpec, fleet: Fleet, load: Load, history: History, now: float) -> Inputs:
    latest, level = history.demand[-1], forecast.smooth(history.demand, now)
    if load.waiting:  # the need is certain: nothing is gained by waiting for a mean
        level = forecast.Point(now, max(latest.demand, level.demand), max(latest.requests, level.requests))
    samples = [pod.sample for pod in fleet.sampled if pod.sample is not None]
    knee = history.saturation_running
    start_seconds = forecast.start_seconds(history.starts)
    saturated = sum(_is_queueing(sample) or (knee is not None and sample.running >= knee) for sample in samples)
    # One full replica among others with room is bad luck of the routing, or an old queue: more replicas cannot take it.
    is_saturated = 2 * saturated >= len(samples)
    return Inputs(
        load=load,
        missing_pods=len(fleet.missing),
        capacity_blocks=max(
            1.0, median(sample.blocks_total for sample in samples) * spec.kv_block_occupancy_percent / 100
        ),
        capacity_requests=None if knee is None else knee + spec.queued_requests_per_replica,
        blocks=level.demand,
        requests=level.requests,
        projected_blocks=forecast.project(history.demand, level.demand, now, start_seconds),
        start_seconds=start_seconds,
        standing=1 if spec.slo is None else min(history.standing.replicas, spec.max_replicas),
        objective=None if spec.slo is None else judge(spec.slo, fleet, history, is_saturated=is_saturated, now=now),
    )


def _wants(fleet: Fleet, inputs: Inputs) -> Mapping[str, int]:
    current, missing = fleet.replicas, inputs.missing_pods
    wants = {"KVBlocks": _signal(inputs.blocks, inputs.projected_blocks, inputs.capacity_blocks, current, missing)}
    if inputs.capacity_requests is not None:
        wants["Queue"] = _signal(inputs.requests, inputs.requests, inputs.capacity_requests, current, missing)
    if inputs.objective is not None and inputs.objective.replicas is not None:
        wants[OBJECTIVE] = inputs.objective.replicas
    if inputs.standing > 1:
        wants[STANDING] = inputs.standing
    return wants


def _recommend(fleet: Fleet, inputs: Inputs) -> tuple[int, str]:
    """(replicas, rule): any signal can raise, all must agree to lower."""
    current, missing, load = fleet.replicas, inputs.missing_pods, inputs.load
    rule = max(inputs.wants, key=lambda name: inputs.wants[name])
    wanted = inputs.wants[rule]
    if wanted < current and 2 * missing >= load.pods + missing:
        return current, "MetricsMissing"
    if wanted == current and rule not in (OBJECTIVE, STANDING):
        return current, "WithinTolerance"
    return wanted, rule


def _signal(demand: float, projected: float, capacity: float, current: int, missing_pods: int) -> int:
    """Replicas for `demand` when one replica carries `capacity`: >= 1, monotone in demand.

    `projected`: demand when a new replica would be ready, >= demand; it counts for growing only.
    """
    if projected > capacity * current * (1 + TOLERANCE):
        return math.ceil(projected / capacity)
    # A silent pod may be as full as the target allows, and it keeps what it carries.
    fitting = math.ceil((demand / capacity + missing_pods) / SHRINK_MARGIN)
    return min(current, max(1, fitting))
