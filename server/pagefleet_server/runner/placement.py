"""Which CPUs the threads of a step may use."""

import contextlib
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch

_ELEMENTS_A_THREAD = 1 << 16
"""Work that torch gives to threads of its own."""


@dataclass(frozen=True, slots=True)
class Places:
    """CPU numbers, none of them in both."""

    leader: frozenset[int]
    """For the thread that runs the steps."""
    others: frozenset[int]
    """For all other threads of the process."""


def places(cpus: Iterable[int], num_threads: int) -> Places | None:
    """The first CPU for the leader and the rest for the others, where there is just one for each thread. None: leave
    it to the system, which finds room where CPUs are more than threads, and shares them out where they are fewer."""
    first, *rest = sorted(cpus)
    return Places(frozenset((first,)), frozenset(rest)) if rest and len(rest) + 1 == num_threads else None


def keep_apart() -> Places | None:
    """Hold the calling thread, which runs the steps, and those it computes with on CPUs of their own; gives the CPUs.

    A thread that wakes for a step while its CPU does something else (an answer is sent, a neighbour computes) is often
    put behind the thread that woke it, which then waits for it, for milliseconds, on the same CPU. Threads that exist
    are moved; those that the caller starts later begin where it is, so call it when the first step is over.
    """
    found = places(os.sched_getaffinity(0), torch.get_num_threads())
    if found is None:
        return None
    torch.zeros(torch.get_num_threads() * _ELEMENTS_A_THREAD).add_(1.0)  # starts OpenMP's threads, if none has run yet
    own = threading.get_native_id()
    for name in os.listdir("/proc/self/task"):
        if int(name) != own:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(name), found.others)
    os.sched_setaffinity(0, found.leader)
    return found
