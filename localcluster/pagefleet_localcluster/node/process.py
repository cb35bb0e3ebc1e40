"""A container's process: its own session, a log file, a pid file, and the end of everything in its group."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SHIM = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(137)
if os.isatty(0):
    os.close(os.open(os.ttyname(0), os.O_RDWR))
import _signal
for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
    _signal.signal(number, _signal.SIG_DFL)
try:
    os.execv(sys.argv[2], sys.argv[3:])
except OSError as error:
    sys.stderr.write(f"exec {sys.argv[2]}: {error.strerror}\\n")
    os._exit(127 if error.errno == 2 else 126)
"""
"""Runs in the new process: asks for SIGKILL when the node dies (PR_SET_PDEATHSIG), makes a terminal on stdin its own,
then becomes the command."""


@dataclass(frozen=True)
class Command:
    """What to start."""

    program: str
    """Absolute path of the executable."""
    argv: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    """Working directory."""


class Process:
    """A started command. `exit_code` is None until it has ended; a signal's death counts as 128 + its number."""

    def __init__(
        self,
        command: Command,
        *,
        output: int,
        error: int = subprocess.STDOUT,
        input: int = subprocess.DEVNULL,
        pid_file: Path | None = None,
    ) -> None:
        """Start it with these file descriptors as stdout, stderr (by default the same) and stdin.

        Raises OSError when nothing can be started."""
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), command.program, *command.argv],
            env=dict(command.environment),
            cwd=command.folder,
            stdin=input,
            stdout=output,
            stderr=error,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self.exit_code: int | None = None
        self._ended = asyncio.Event()
        self._pid_file = pid_file
        if pid_file is not None:
            pid_file.write_text(f"{self.pid}\n")
        self._watch()

    async def wait(self) -> int:
        """The exit code, once the process has ended and its group has been killed."""
        await self._ended.wait()
        return self.exit_code if self.exit_code is not None else -1

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group."""
        if self.exit_code is None:
            _kill_group(self.pid, number)

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        descriptor = os.pidfd_open(self.pid)

        def ended() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            self._reap()

        loop.add_reader(descriptor, ended)

    def _reap(self) -> None:
        code = self._popen.wait()
        self.exit_code = code if code >= 0 else 128 - code
        _kill_group(self.pid, signal.SIGKILL)
        if self._pid_file is not None:
            self._pid_file.unlink(missing_ok=True)
        self._ended.set()


def start_time(pid: int) -> str:
    """When a process started, in the kernel's ticks since boot; empty when there is no such process (or no /proc)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def end_stale(directory: Path) -> list[int]:
    """Kill what is left of the sessions that pid files below `directory` name; returns the pids.

    For a node that starts again after it was killed. A process counts as ours when it is in such a session and its
    environment mentions `directory`, so that a number that was used again harms nobody."""
    sessions = {pid_file.read_text().strip() for pid_file in directory.rglob("*.pid")}
    marker = str(directory).encode()
    ended = []
    for entry in Path("/proc").glob("[0-9]*") if sessions else ():
        with contextlib.suppress(OSError):
            session = (entry / "stat").read_text().rpartition(")")[2].split()[3]
            if session in sessions and marker in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
                ended.append(int(entry.name))
    for pid_file in directory.rglob("*.pid"):
        pid_file.unlink(missing_ok=True)
    return ended


def _kill_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
