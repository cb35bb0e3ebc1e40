"""FlashInfer behind the same signature, where it is installed: baseline and choice.

CUDA only; never chosen by "auto"; not a dependency: `pip install flashinfer-python`. It compiles its kernels on the
machine when they are first used, which takes nvcc and minutes. Knows no other backend.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from pagefleet_kernels.errors import BackendUnavailable
from pagefleet_kernels.flashinfer.backend import PLAN_ARGUMENTS, FlashInferBackend

__all__ = ["FlashInferBackend", "make_backend"]

WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"


def make_backend() -> FlashInferBackend:
    """Raises BackendUnavailable without a CUDA device, without the package, or with one of another contract."""
    if not torch.cuda.is_available():
        raise BackendUnavailable("no CUDA device")
    try:
        package = importlib.import_module("flashinfer")
    except ImportError as error:
        raise BackendUnavailable(f"flashinfer cannot be imported ({error}): pip install flashinfer-python") from error
    return FlashInferBackend(checked_wrapper(package))


def checked_wrapper(package: Any) -> Callable[..., Any]:
    """The package's wrapper class, if its plan() takes what we say. Raises BackendUnavailable."""
    version = getattr(package, "__version__", "of unknown version")
    wrapper: Callable[..., Any] | None = getattr(package, WRAPPER, None)
    if wrapper is None:
        raise BackendUnavailable(f"flashinfer {version} has no {WRAPPER}")
    plan = getattr(wrapper, "plan", None)
    known = inspect.signature(plan).parameters.keys() if callable(plan) else set()
    if missing := PLAN_ARGUMENTS - known:
        raise BackendUnavailable(f"flashinfer {version}: {WRAPPER}.plan does not take {', '.join(sorted(missing))}")
    return wrapper
