"""The horizontal pod autoscaler, autoscaling/v2, on two Pods metrics: KV-cache occupancy and waiting requests.

After kubernetes pkg/controller/podautoscaler (replica_calculator.go, horizontal.go): the ratio of the mean to the
target over the pods with metrics; tolerance 0.1; pods without metrics count at target when the ratio says down and at
0 when it says up, those that have not started at 0 when it says up; no change when that turns the direction round; the
largest of the metrics; stabilisation windows and the default policies. It sees the same fresh samples as every policy
here: an adapter's delay is left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_operator.fleet import Fleet, PodState
from pagefleet_simulator.policies.policy import Window

TOLERANCE = 0.1
SYNC_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class HpaSettings:
    """Targets of both metrics, and the scale-down window."""

    occupancy_percent: float = 80.0
    waiting: float = 5.0
    down_window_seconds: float = 300.0


class Hpa:
    """Its default policies for growing: 4 pods or 100 % within 15 s, whichever is more; one sync is one period."""

    name = "HPA v2"
    period_seconds = SYNC_SECONDS

    def __init__(self, settings: HpaSettings) -> None:
        self._settings = settings
        self._recommended = Window(settings.down_window_seconds) if settings.down_window_seconds > 0 else None

    def decide(self, fleet: Fleet, now: float) -> int:
        """One sync."""
        samples = [pod.sample for pod in fleet.pods if pod.state is PodState.READY and pod.sample is not None]
        if not samples:
            return fleet.replicas
        occupancy = [100 * sample.blocks_used / sample.blocks_total for sample in samples]
        waiting = [float(sample.waiting) for sample in samples]
        unstarted = sum(pod.state in (PodState.UNSCHEDULABLE, PodState.STARTING) for pod in fleet.pods)
        missing = sum(pod.state in (PodState.UNREACHABLE, PodState.CRASHED) for pod in fleet.pods)
        missing += sum(pod.state is PodState.READY and pod.sample is None for pod in fleet.pods)
        wanted = max(
            replicas(occupancy, self._settings.occupancy_percent, fleet.replicas, missing, unstarted),
            replicas(waiting, self._settings.waiting, fleet.replicas, missing, unstarted),
        )
        if self._recommended is not None:
            if not len(self._recommended):  # as the controller does at its start
                self._recommended.add(now, fleet.replicas)
            self._recommended.add(now, wanted)
            wanted = max(wanted, min(fleet.replicas, int(self._recommended.maximum)))
        return min(wanted, max(2 * fleet.replicas, fleet.replicas + 4))


def replicas(values: Sequence[float], target: float, current: int, missing: int, unstarted: int) -> int:
    """The count that one metric asks for; `values` are those of the pods that have it, at least one."""
    ratio = sum(values) / len(values) / target
    if not missing and not (unstarted and ratio > 1):
        return current if abs(1 - ratio) <= TOLERANCE else math.ceil(ratio * len(values))
    filled = list(values)
    if ratio < 1:
        filled += [target] * missing
    else:
        filled += [0.0] * (missing + unstarted)
    again = sum(filled) / len(filled) / target
    if abs(1 - again) <= TOLERANCE or (ratio < 1) != (again < 1):
        return current
    wanted = math.ceil(again * len(filled))
    if (again < 1 and wanted > current) or (again > 1 and wanted < current):
        return current
    return wanted
