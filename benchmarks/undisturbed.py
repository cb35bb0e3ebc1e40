"""Timing one step after the other on a machine that others use, too."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
PRIORITY = 20


def may_be_undisturbed() -> bool:
    """Whether this process may ask for real-time scheduling (root, or CAP_SYS_NICE)."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(PRIORITY))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except (OSError, AttributeError):
        return False
    return True


def timed(work: Callable[[], T], *, bursts: bool) -> tuple[T, float]:
    """What `work` gives, and the seconds it took. With bursts all threads of the process run before every other one
    meanwhile, and sleep as long afterwards, so that the others lose half of the machine and no more."""
    if bursts:
        _schedule(os.SCHED_RR, PRIORITY)
    began = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - began
    if bursts:
        _schedule(os.SCHED_OTHER, 0)
        time.sleep(seconds)
    return result, seconds


@contextlib.contextmanager
def ahead_of_others(*, wanted: bool) -> Iterator[None]:
    """What is started meanwhile runs before everything else on the machine; afterwards the others have as long."""
    began = time.perf_counter()
    if wanted:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(PRIORITY))
    try:
        yield
    finally:
        if wanted:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            time.sleep(time.perf_counter() - began)


def _schedule(policy: int, priority: int) -> None:
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))
        except ProcessLookupError:
            continue  # it has just ended


def conditions(*, bursts: bool) -> str:
    """For the first line of a table."""
    load = f"load average {os.getloadavg()[0]:.1f}"
    return f"{load}, steps run before everything else" if bursts else load
