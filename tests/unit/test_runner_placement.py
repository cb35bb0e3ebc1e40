"""Threads of a step on CPUs of their own, where there is one for each."""

import os
import subprocess
import sys

import pytest

from pagefleet_server.runner.placement import Places, places

PROGRAM = """
import os, threading, torch
from pagefleet_server.runner.placement import keep_apart
before = os.sched_getaffinity(0)
torch.set_num_threads(len(before) + {more})
end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
found = keep_apart()
own = os.sched_getaffinity(0)
tids = [int(name) for name in os.listdir("/proc/self/task") if int(name) != threading.get_native_id()]
others = [os.sched_getaffinity(tid) for tid in tids]
end.set()
if {more} or len(before) == 1:
    assert found is None and own == before and all(cpus == before for cpus in others)
else:
    assert found is not None and own == found.leader and len(own) == 1
    assert len(others) >= len(before), "OpenMP's threads are not there yet"
    assert all(cpus == before - own for cpus in others), (own, others)
print("held")
"""


def test_the_leader_gets_the_first_cpu_and_the_others_the_rest() -> None:
    assert places({5, 2, 9}, 3) == Places(frozenset({2}), frozenset({5, 9}))


@pytest.mark.parametrize(("cpus", "num_threads"), [({0}, 1), ({0, 1}, 1), ({0, 1, 2}, 2), ({0, 1}, 3), ({0}, 2)])
def test_the_system_places_threads_where_cpus_are_more_or_fewer(cpus: set[int], num_threads: int) -> None:
    assert places(cpus, num_threads) is None


@pytest.mark.parametrize("more", [0, 1])
def test_every_thread_of_the_process_keeps_its_place(more: int) -> None:
    """In a process of its own: a place is for good."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(more=more)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": ""},
    )
    assert done.stdout == "held\n", done.stderr
