"""What the autoscaler sees of the pods: states and samples, without any Kubernetes object."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pagefleet_operator.latency import Latencies


class PodState(StrEnum):
    """What a pod does, in the words of `status.pods`."""

    READY = "Ready"
    STARTING = "Starting"
    DRAINING = "Draining"
    UNREACHABLE = "Unreachable"
    UNSCHEDULABLE = "Unschedulable"
    CRASHED = "Crashed"


@dataclass(frozen=True, slots=True)
class Sample:
    """One pod's load at one moment, from its /metrics."""

    time: float
    """When it was taken, seconds on the operator's clock."""
    blocks_used: int
    blocks_cached: int
    blocks_total: int
    """>= 1; used + cached never exceed it."""
    blocks_waiting: int
    """New blocks that accepted but not running requests will need."""
    running: int
    waiting: int
    oldest_waiting_seconds: float = 0.0
    latencies: Latencies = field(default_factory=Latencies)
    """Cumulative since the pod's start."""


@dataclass(frozen=True, slots=True)
class FleetPod:
    """One pod as the autoscaler sees it."""

    name: str
    state: PodState
    sample: Sample | None = None
    """None: missing, which is never the same as zero."""
    start_seconds: float | None = None
    """From its creation to ready; None until it was."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """All pods of one LLMDeployment and the wanted count."""

    replicas: int
    """spec.replicas: what is wanted now."""
    pods: tuple[FleetPod, ...] = ()
    latencies: Latencies = field(default_factory=Latencies)
    """What all pods observed in the last window."""

    @property
    def sampled(self) -> tuple[FleetPod, ...]:
        """Ready pods with a fresh sample; leaving pods take their blocks with them and do not count."""
        return tuple(pod for pod in self.pods if pod.state is PodState.READY and pod.sample is not None)

    @property
    def missing(self) -> tuple[FleetPod, ...]:
        """Pods that serve and say nothing."""
        return tuple(
            pod
            for pod in self.pods
            if pod.state is PodState.UNREACHABLE or (pod.state is PodState.READY and pod.sample is None)
        )

    @property
    def starting(self) -> int:
        """Wanted replicas that will serve soon: not those that find no node or crash, which may never."""
        here = (PodState.READY, PodState.UNREACHABLE, PodState.UNSCHEDULABLE, PodState.CRASHED)
        return max(0, self.replicas - sum(pod.state in here for pod in self.pods))


@dataclass(frozen=True, slots=True)
class Load:
    """Sums over the sampled pods; zero pods give zero sums."""

    pods: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_total: int = 0
    blocks_waiting: int = 0
    running: int = 0
    waiting: int = 0

    @property
    def demand_blocks(self) -> int:
        """Blocks held plus blocks that the queue will need."""
        return self.blocks_used + self.blocks_waiting

    @property
    def occupancy_percent(self) -> int | None:
        """Used of total, rounded to whole percent; None when nothing is known."""
        return round(100 * self.blocks_used / self.blocks_total) if self.blocks_total else None


def load_of(samples: Iterable[Sample]) -> Load:
    """Sum samples."""
    load = Load()
    for sample in samples:
        load = replace(
            load,
            pods=load.pods + 1,
            blocks_used=load.blocks_used + sample.blocks_used,
            blocks_cached=load.blocks_cached + sample.blocks_cached,
            blocks_total=load.blocks_total + sample.blocks_total,
            blocks_waiting=load.blocks_waiting + sample.blocks_waiting,
            running=load.running + sample.running,
            waiting=load.waiting + sample.waiting,
        )
    return load
