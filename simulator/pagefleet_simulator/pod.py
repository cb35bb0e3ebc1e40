"""A simulated pod: its life from creation to its end, and what a scrape of it shows."""

from dataclasses import dataclass

from pagefleet_operator.fleet import FleetPod, PodState, Sample
from pagefleet_operator.pods import Pod, Trouble
from pagefleet_operator.times import timestamp
from pagefleet_simulator.replica import Replica


@dataclass(slots=True)
class SimulatedPod:
    """State changes are made by the cluster."""

    name: str
    created: float
    state: PodState
    incarnation: int = 0
    """Counts containers: events of an earlier one do not count."""
    device_since: float | None = None
    replica: Replica | None = None
    """None until ready."""
    start_seconds: float | None = None
    drains_since: float | None = None
    sample: Sample | None = None
    """The last one that was had."""
    is_silent: bool = False
    """Whether the last scrape got no answer."""

    @property
    def takes_new_connections(self) -> bool:
        """Whether the Service's endpoints hold it."""
        return self.state is PodState.READY

    def fresh(self, now: float, stale_seconds: float) -> Sample | None:
        """The last sample unless it is too old."""
        return self.sample if self.sample is not None and now - self.sample.time <= stale_seconds else None

    def view(self, now: float, stale_seconds: float) -> FleetPod:
        """As the operator sees it."""
        sample = self.fresh(now, stale_seconds) if self.state is PodState.READY else None
        silent = self.state is PodState.READY and sample is None and self.is_silent
        return FleetPod(self.name, PodState.UNREACHABLE if silent else self.state, sample, self.start_seconds)

    def candidate(self) -> Pod:
        """As the operator's choice of victims sees it."""
        trouble = {
            PodState.UNSCHEDULABLE: Trouble("Unschedulable", ""),
            PodState.CRASHED: Trouble("CrashLoop", ""),
        }.get(self.state)
        return Pod(
            name=self.name,
            uid=self.name,
            resource_version="",
            ip=None,
            ready=self.state is PodState.READY,
            terminating=self.state is PodState.DRAINING,
            finished=False,
            created=timestamp(self.created),
            template_hash=None,
            deletion_cost=None,
            restarts=0,
            trouble=trouble,
            start_seconds=None,
        )
