"""Host memory: what this process may use and what it uses."""

import os
from pathlib import Path

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
STATM = Path("/proc/self/statm")


def limit_bytes(cgroup: Path = CGROUP_LIMIT) -> int:
    """The machine's memory, cut by the cgroup's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        text = cgroup.read_text().strip()
        return total if text == "max" else min(total, int(text))
    except (OSError, ValueError):
        return total


def resident_bytes(statm: Path = STATM) -> int:
    """What this process holds in memory now; 0 where the system does not say."""
    try:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
