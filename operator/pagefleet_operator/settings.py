"""Every setting of the operator, by subject. A default lives here once; flags and docs read it from here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version


def default_server_image() -> str:
    """The server image of this release."""
    return f"pagefleet/server:{version('pagefleet')}"


@dataclass(frozen=True, slots=True)
class ChildSettings:
    """What goes into the children beside the spec."""

    server_image: str = field(default_factory=default_server_image)
    """Image of servers whose spec names none. Environment: PAGEFLEET_SERVER_IMAGE."""
    allowed_template_fields: tuple[str, ...] | None = None
    """Paths of spec.template that users may set, like spec.nodeSelector; None: all. Flag: --allowed-template-fields."""
    monitoring_namespace: str = "monitoring"
    """Whose pods a NetworkPolicy of ours admits. Flag: --monitoring-namespace."""
    operator_namespace: str | None = None
    """Where the operator runs, for the same; None: outside the cluster, or not known."""
    grace_margin_seconds: int = 15
    """Added to drain delay + timeout for terminationGracePeriodSeconds: the process still has to end."""
    probe_period_seconds: int = 2
    """Period of the startup and readiness probes: a new replica takes requests at most this late."""


@dataclass(frozen=True, slots=True)
class ScrapeSettings:
    """How pods are asked for their load."""

    period_seconds: float = 2.0
    """Time from the start of one round to the start of the next."""
    timeout_seconds: float = 1.0
    """Deadline of one pod's answer, headers and body."""
    max_bytes: int = 256 * 1024
    """Longest answer that is read; a longer one is no answer."""
    stale_after_periods: float = 5.0
    """A sample older than this many periods is missing."""
    concurrency: int = 128
    """Pods asked at once."""

    @property
    def stale_after_seconds(self) -> float:
        """Age from which a sample counts as missing."""
        return self.period_seconds * self.stale_after_periods


@dataclass(frozen=True, slots=True)
class ReconcileSettings:
    """The loop of each object."""

    kinds_seconds: float = 10.0
    """How often it is looked whether the cluster has the kind PodMonitor."""
    first_resyncs_seconds: tuple[float, ...] = (5.0, 20.0)
    """Pauses before the first ones: of what is deleted between our first list and the watches' own no event tells."""
    resync_seconds: float = 120.0
    """Everything is listed afresh this often: it heals events that a watch lost."""
    concurrency: int = 4
    """Objects that are reconciled at once. Enough to keep one core or an API server busy, as each sends what it can in
    parallel; more of them would only wait for each other, and the lease is renewed in time."""
    min_backoff_seconds: float = 0.5
    """Pause after the first failure; doubles with each further one."""
    max_backoff_seconds: float = 30.0
    """Longest pause after failures."""
    status_interval_seconds: float = 2.0
    """Shortest time between two status writes that only change numbers; conditions and replicas go at once."""
    writes_per_second: int = 50
    """Writes of everything in any second, renewals of the lease apart: those must not wait, and are few."""
    status_writes_per_second: float = 40.0
    """Of these, statuses whose numbers alone have changed, evenly spaced."""
    victims_deadline_seconds: float = 10.0
    """A scale-down waits this long for the victims' deletion cost to be seen, then goes ahead."""
    contested_repairs: int = 3
    """Repairs of the same child within contested_window_seconds after which it is reported as contested."""
    contested_window_seconds: float = 300.0
    """Within which those repairs count, and how long the report stays after the last one."""
    contested_pause_seconds: float = 30.0
    """Pause between two repairs of a contested child: a fight is never hot."""


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Requests to the API server."""

    request_timeout_seconds: float = 20.0
    connect_timeout_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Leader election. A standby takes over at most duration + retry after the leader stopped renewing.

    The other times are parts of the duration: a leader gives up long before another one may begin.
    """

    duration_seconds: int = 15
    """How long others must see the lease unchanged before they may take it; 3..300."""

    @property
    def renew_deadline_seconds(self) -> float:
        """A leader that has not renewed for so long writes nothing any more and ends."""
        return self.duration_seconds * 8 / 15

    @property
    def write_timeout_seconds(self) -> float:
        """Deadline of one write of the lease."""
        return self.duration_seconds / 3

    @property
    def retry_seconds(self) -> float:
        """Period of renewals and of tries to acquire."""
        return self.duration_seconds * 2 / 15


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """The whole."""

    namespaces: tuple[str, ...] = ()
    """Namespaces that are served; empty: all of them."""
    children: ChildSettings = field(default_factory=ChildSettings)
    scrape: ScrapeSettings = field(default_factory=ScrapeSettings)
    reconcile: ReconcileSettings = field(default_factory=ReconcileSettings)
    api: ApiSettings = field(default_factory=ApiSettings)
    lease: LeaseSettings = field(default_factory=LeaseSettings)
    device_budgets: Mapping[str, int] = field(default_factory=dict)
    """Accelerators that the autoscaler may use, by namespace; a namespace that is not in it has no bound."""
