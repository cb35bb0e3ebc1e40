"""CPUs this process may use: its affinity, cut by the control group's quota."""

import math
import os

from pagefleet_server import cgroup


def available_cpus() -> int:
    """At least 1. A quota of 1.5 CPUs counts as 2 threads, at most those of the affinity."""
    cpus, quota = len(os.sched_getaffinity(0)), cgroup.cpu_limit()
    return max(1, cpus if quota is None else min(cpus, math.ceil(quota)))
