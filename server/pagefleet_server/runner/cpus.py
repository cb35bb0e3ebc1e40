"""CPUs this process may use: its affinity, cut by the cgroup's quota."""

import math
import os
from pathlib import Path


def available_cpus(cgroup_cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """At least 1. A quota of 1.5 CPUs counts as 2 threads at most of the affinity's."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = cgroup_cpu_max.read_text().split()
        if quota != "max":
            cpus = min(cpus, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        return max(1, cpus)
    return max(1, cpus)
