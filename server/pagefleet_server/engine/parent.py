"""The engine ends with the API process, whatever happens to that one."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


class ParentGoneError(Exception):
    """The API process ended before the engine had started."""


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent's thread that started us ends (Linux; elsewhere the closed socket is
    noticed between two steps). Raises ParentGoneError when that has already happened, OSError when refused."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(code)}")
    if os.getppid() != parent_pid:
        raise ParentGoneError(f"the API process {parent_pid} is gone")


def leave_signals_to_parent() -> None:
    """Ctrl-C and a signal to the whole process group reach the API process too; it drains, then sends Stop."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
