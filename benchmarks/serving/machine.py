"""What this machine is, and who takes its cores."""

import asyncio
import os
import platform
import subprocess
import time
from pathlib import Path

import psutil

from benchmarks.serving.outcome import QUIET_CORES


def facts() -> dict[str, object]:
    """Names of the machine and of the code, for beside the figures."""
    model = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit.stdout.strip() + ("+" if changed.stdout.strip() else ""),
        "cpu": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


class CoreMeter:
    """Cores taken since it was made: by everybody else, by a server and its children, by this process."""

    def __init__(self, server_pid: int) -> None:
        self._pid = server_pid
        self._began = time.perf_counter()
        self._all, self._server, self._own = self._read()

    def _read(self) -> tuple[float, float, float]:
        own = psutil.Process().cpu_times()
        return _busy_seconds(), tree_cpu_seconds(self._pid), own.user + own.system

    def read(self) -> tuple[float, float, float]:
        """Mean cores of (others, server, this process)."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        everybody, server, own = self._read()
        server, own = server - self._server, own - self._own
        others = everybody - self._all - server - own
        return max(0.0, others / seconds), server / seconds, own / seconds


def _busy_seconds() -> float:
    """CPU time of the whole machine that was not idle; what a hypervisor took counts as busy."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it that still live."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def tree_cpu_seconds(pid: int) -> float:
    """CPU time of a process and all below it."""
    total = 0.0
    for process in tree(pid):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def peak_mib(pid: int) -> float:
    """High-water of resident memory, summed over the processes of a tree: shared pages count in each."""
    total = 0
    for process in tree(pid):
        for line in _lines(f"/proc/{process.pid}/status"):
            if line.startswith("VmHWM:"):
                total += int(line.split()[1])
    return total / 1024


async def wait_quiet(patience: float) -> None:
    """Return once everybody else, idle servers included, left the cores alone for a second, or after `patience` s."""
    deadline = time.perf_counter() + patience
    told = False
    while True:
        own, began, busy = psutil.Process().cpu_times(), time.perf_counter(), _busy_seconds()
        await asyncio.sleep(1.0)
        now = psutil.Process().cpu_times()
        spent = _busy_seconds() - busy - (now.user + now.system - own.user - own.system)
        others = spent / (time.perf_counter() - began)
        if others <= QUIET_CORES or time.perf_counter() > deadline:
            return
        if not told:
            print(f"others use {others:.1f} cores; waiting for a quiet machine, {patience:.0f} s at most", flush=True)
            told = True
