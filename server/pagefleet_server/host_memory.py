"""Host memory: what this process may use and what it uses."""

import os
from pathlib import Path

from pagefleet_server import cgroup

PROC = Path("/proc")


def limit_bytes() -> int:
    """The machine's memory, cut by the control group's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = cgroup.memory_limit()
    return total if limit is None else min(total, limit)


def resident_bytes(process: str = "self") -> int:
    """What a process holds in memory now; 0 where the system does not say."""
    try:
        return int((PROC / process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def restart_peak() -> None:
    """peak_bytes() counts from now on, where the system lets us say so."""
    try:
        (PROC / "self" / "clear_refs").write_text("5")
    except OSError:
        return


def peak_bytes() -> int:
    """The most that this process held at once, since restart_peak(); 0 where the system does not say."""
    try:
        lines = (PROC / "self" / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
