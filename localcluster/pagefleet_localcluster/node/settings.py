"""What a node is and how it behaves."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from pagefleet_localcluster.node.images import ImageTable


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True)
class NodeSettings:
    """One process node."""

    name: str
    """The Node object's name."""
    directory: Path
    """Everything of this node's pods lives here: logs, volumes, pid files."""
    shared_directory: Path
    """What pods of all nodes share: claims (`claims/NAMESPACE/NAME`) and the caches of programs (`cache`)."""
    index: int = 0
    """Which of the machine's nodes this is, 0..31: pods get addresses in 127.(64+index).0.0/16, and GPU slots
    start at index * gpus."""
    gpus: int = 0
    """`nvidia.com/gpu` slots offered."""
    cpus: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Cores offered; requests count against them, nothing enforces limits."""
    memory_bytes: int = field(default_factory=_memory_bytes)
    """Memory offered."""
    max_pods: int = 110
    """Kubernetes' default."""
    images: ImageTable = field(default_factory=ImageTable)
    """What an image name means here."""
    kubeconfig: Path | None = None
    """What pods get as KUBECONFIG in place of a service account's token, unless they set `automountServiceAccountToken`
    to false. Its rights are the file's, whatever the service account's are. None gives nothing."""
    lease_seconds: float = 10.0
    """Period of heartbeats; the node counts as dead after 40 s without one."""
    backoff_min_seconds: float = 10.0
    """Before the second restart of a crashing container (the first is at once); doubles each time ..."""
    backoff_max_seconds: float = 300.0
    """... up to this, and starts anew after ten minutes of running (Kubernetes' values)."""
    stop_seconds: float = 10.0
    """How long pods may take to end when the node itself stops."""
    log_bytes: int = 10 << 20
    """A container's log is cut to its newer half beyond this."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < 32:
            raise ValueError(f"node index {self.index} is outside 0..31: at most 32 nodes on one machine")
        if self.gpus < 0 or self.cpus < 1:
            raise ValueError(f"node {self.name}: gpus {self.gpus} must be >= 0 and cpus {self.cpus} >= 1")
