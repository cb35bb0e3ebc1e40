"""Paged attention and its neighbours in Triton, for CUDA devices.

    kernels/    Triton source, which imports triton alone
    configs     tile sizes by device and head size
    attention, memory, pointwise, sampling     planners: shapes and strides in, launches (values) out
    library     torch.ops.pagefleet.*, which plan and run
    backend     the object that the rest of the package sees

Imports torch and triton (the library; this package bears the same name one level down), and nothing of other backends.
"""

import importlib.util
import os
from typing import TYPE_CHECKING

import torch

from pagefleet_kernels.errors import BackendUnavailable

if TYPE_CHECKING:
    from pagefleet_kernels.triton.backend import TritonBackend

__all__ = ["make_backend"]

OLDEST_CAPABILITY = (8, 0)
"""bf16 tensor cores and asynchronous copies."""


def make_backend() -> "TritonBackend":
    """The backend for this process's CUDA device, or, with TRITON_INTERPRET=1, for CPU tensors (semantics only, slow).

    Raises BackendUnavailable when triton is not installed or there is no CUDA device of compute capability >= 8.0.
    """
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailable("triton is not installed: pip install 'triton>=3.6'")
    if os.environ.get("TRITON_INTERPRET") != "1":
        if not torch.cuda.is_available():
            raise BackendUnavailable("no CUDA device")
        capability = torch.cuda.get_device_capability()
        if capability < OLDEST_CAPABILITY:
            raise BackendUnavailable(f"compute capability {capability} is below {OLDEST_CAPABILITY}")
    # Only now: the kernels bind to the interpreter or the compiler when they are defined.
    from pagefleet_kernels.triton.backend import TritonBackend

    return TritonBackend()
