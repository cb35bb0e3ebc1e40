"""What is simulated besides load and policy: the cluster, its faults, its clients."""

import math
from dataclasses import asdict, dataclass, field

from pagefleet_simulator.profile import Profile


@dataclass(frozen=True, slots=True)
class Objective:
    """A request is served well when both hold."""

    time_to_first_token_seconds: float = 3.0
    time_per_token_seconds: float = 0.1
    """Mean over the tokens after the first."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong. All off by default."""

    crash_every_seconds: float | None = None
    """Mean life of a replica until its container crashes; its requests fail, and it starts again."""
    silent_part: float = 0.0
    """Part of the scrapes of each pod that get no answer, 0..1."""
    silence: tuple[tuple[float, float], ...] = ()
    """(from, to) seconds in which no pod answers a scrape."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Raises ValueError on values that cannot be simulated."""

    profile: Profile
    start_seconds: float = 60.0
    """From the creation of a pod with a device to ready, on average."""
    start_spread: float = 0.1
    """Start-ups are uniform within this part of the average."""
    min_replicas: int = 1
    max_replicas: int = 16
    initial_replicas: int = 1
    """Ready when the trace begins."""
    devices: int | None = None
    """Accelerators of the cluster; pods beyond them stay unschedulable. None: enough."""
    scrape_seconds: float = 2.0
    stale_seconds: float = 10.0
    """A sample older than this is missing."""
    drain_delay_seconds: float = 10.0
    drain_timeout_seconds: float = 300.0
    routing: str = "connection"
    """connection (a Service: random for each connection, kept alive), round-robin or least-loaded."""
    clients: int = 32
    """Client processes, each with its own pool of connections."""
    keep_alive_seconds: float = 75.0
    warmup_seconds: float = 0.0
    """Of the trace's beginning: it is lived through and remembered by the policy, but nothing of it is counted."""
    tail_seconds: float = 600.0
    """After the trace's end requests may take so long to finish; then they count as failed."""
    objective: Objective = field(default_factory=Objective)
    faults: Faults = field(default_factory=Faults)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.initial_replicas <= self.max_replicas:
            raise ValueError(
                f"replicas: 1 <= min {self.min_replicas} <= initial {self.initial_replicas} <= "
                f"max {self.max_replicas} does not hold"
            )
        above_zero = {
            name: getattr(self, name)
            for name in ("start_seconds", "scrape_seconds", "stale_seconds", "keep_alive_seconds")
        }
        above_zero |= asdict(self.objective)
        if self.faults.crash_every_seconds is not None:
            above_zero["crash_every_seconds"] = self.faults.crash_every_seconds
        for name, value in above_zero.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be above 0 and finite")
        if self.devices is not None and self.devices < 1:
            raise ValueError(f"devices is {self.devices}; at least 1, or leave it out for enough")
        if self.warmup_seconds < 0:
            raise ValueError(f"warmup_seconds is {self.warmup_seconds}; it must be at least 0")
        if self.clients < 1 or not 0 <= self.faults.silent_part <= 1:
            raise ValueError(f"clients is {self.clients}, silent_part {self.faults.silent_part}; >= 1 and 0..1")
