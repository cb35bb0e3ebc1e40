"""FlashAttention as torch brings it (torch.nn.attention.varlen), behind the same signature: baseline and choice.

CUDA only; never chosen by "auto". Knows no other backend.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from pagefleet_kernels.errors import BackendUnavailable
from pagefleet_kernels.varlen.backend import VarlenBackend

__all__ = ["VarlenBackend", "make_backend"]


def make_backend() -> VarlenBackend:
    """Raises BackendUnavailable without a CUDA device, or with a torch (before 2.12) that takes no block table."""
    if not torch.cuda.is_available():
        raise BackendUnavailable("no CUDA device")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise BackendUnavailable(f"torch {torch.__version__} has no torch.nn.attention.varlen") from error
    wanted = {"block_table", "seqused_k", "num_splits", "enable_gqa"}
    if missing := wanted - inspect.signature(varlen_attn).parameters.keys():
        raise BackendUnavailable(f"torch {torch.__version__}: varlen_attn does not take {', '.join(sorted(missing))}")
    attend: Callable[..., Any] = varlen_attn
    return VarlenBackend(attend)
