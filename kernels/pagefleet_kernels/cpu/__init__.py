"""The CPU backend: C++ without torch headers, built for a fixed instruction set at first use, called through ctypes.

Import direction: backend -> {cache, library, linear} -> {build -> isa}. It knows no other backend.
"""

from pagefleet_kernels.cpu.backend import CpuBackend
from pagefleet_kernels.cpu.library import find_library

__all__ = ["CpuBackend", "make_backend"]


def make_backend() -> CpuBackend:
    """The backend for this machine. Raises BackendUnavailable: wrong CPU, no compiler, a build that failed."""
    return CpuBackend(find_library())
