"""`behavior` of autoscaling/v2: stabilisation windows and policies. Pure."""

import math

from pagefleet_operator.history import History
from pagefleet_operator.model import AutoscalingSpec, ScalingPolicy, ScalingRules


def stabilize(
    spec: AutoscalingSpec, recommended: int, current: int, history: History, now: float
) -> tuple[int, str | None]:
    """The recommendation within its windows, and what held it back.

    Growing follows the lowest recommendation of the scale-up window, shrinking the highest of the scale-down window.
    `history` already holds `recommended`.
    """
    longest = float(max(spec.scale_up.stabilization_window_seconds, spec.scale_down.stabilization_window_seconds))
    lowest = highest = recommended
    if spec.scale_up.stabilization_window_seconds:
        seen = history.min_since(
            now, window_seconds=spec.scale_up.stabilization_window_seconds, bucket_window_seconds=longest
        )
        lowest = recommended if seen is None else min(seen, recommended)
    if spec.scale_down.stabilization_window_seconds:
        seen = history.max_since(
            now, window_seconds=spec.scale_down.stabilization_window_seconds, bucket_window_seconds=longest
        )
        highest = recommended if seen is None else max(seen, recommended)
    stable = min(max(current, lowest), highest)
    if stable == recommended:
        return stable, None
    return stable, "ScaleUpStabilized" if stable < recommended else "ScaleDownStabilized"


def limit_rate(
    spec: AutoscalingSpec, wanted: int, current: int, history: History, now: float
) -> tuple[int, str | None]:
    """`wanted` as far as the policies allow now, and what held it back."""
    if wanted > current:
        limit = _limit_up(spec.scale_up, current, history, now)
        return (wanted, None) if wanted <= limit else (limit, "ScaleUpLimit")
    if wanted < current:
        limit = _limit_down(spec.scale_down, current, history, now)
        return (wanted, None) if wanted >= limit else (limit, "ScaleDownLimit")
    return wanted, None


def _period_start(policy: ScalingPolicy, current: int, history: History, now: float) -> int:
    """Replicas at the start of the policy's period."""
    start = now - policy.period_seconds
    return current - history.added_since(start, now) + history.removed_since(start, now)


def _limit_up(rules: ScalingRules, current: int, history: History, now: float) -> int:
    if rules.select_policy == "Disabled":
        return current
    limits = []
    for policy in rules.policies:
        start = _period_start(policy, current, history, now)
        added = policy.value if policy.type == "Pods" else math.ceil(start * policy.value / 100)
        limits.append(start + added)
    return max(current, max(limits) if rules.select_policy == "Max" else min(limits))


def _limit_down(rules: ScalingRules, current: int, history: History, now: float) -> int:
    if rules.select_policy == "Disabled":
        return current
    limits = []
    for policy in rules.policies:
        start = _period_start(policy, current, history, now)
        kept = start - policy.value if policy.type == "Pods" else math.floor(start * (1 - policy.value / 100))
        limits.append(kept)
    return min(current, max(0, min(limits) if rules.select_policy == "Max" else max(limits)))
