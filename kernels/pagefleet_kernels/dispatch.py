"""Choosing a backend: once, by device and preference, logged."""

import importlib
import importlib.util
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from pagefleet_kernels.backend import Backend
from pagefleet_kernels.checks import refuse
from pagefleet_kernels.errors import BackendUnavailable
from pagefleet_kernels.probe import probe

_logger = logging.getLogger(__name__)

MODULES: Mapping[str, str] = MappingProxyType(
    {
        "triton": "pagefleet_kernels.triton",
        "cpu": "pagefleet_kernels.cpu",
        "varlen": "pagefleet_kernels.varlen",
        "flashinfer": "pagefleet_kernels.flashinfer",
        "reference": "pagefleet_kernels.reference",
    }
)
"""Backend name -> package with `make_backend() -> Backend`, imported only when it is tried."""

PROBES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"varlen": {"block_size": 256, "softcap": None}, "flashinfer": {"block_size": 16, "softcap": 20.0}}
)
"""Backends that adapt a library's attention -> what `probe` tries them with before they serve."""

AUTO_ORDER: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cuda": ("triton", "reference"), "cpu": ("cpu", "reference")}
)
"""Device type -> backends in the order in which "auto" tries them."""


def select_backend(device: torch.device, preference: str = "auto") -> Backend:
    """The backend for a device. preference: auto (the fastest that can run here) or a backend's name.

    Raises BackendUnavailable when the named one cannot run, KernelArgumentError for an unknown name.
    """
    if preference != "auto" and preference not in MODULES:
        raise refuse("preference", repr(preference), f"auto or one of {', '.join(MODULES)}")
    candidates = AUTO_ORDER.get(device.type, ("reference",)) if preference == "auto" else (preference,)
    reasons: list[str] = []
    for name in candidates:
        try:
            backend = _make(name, device)
        except BackendUnavailable as error:
            reasons.append(f"{name}: {error.reason}")
            continue
        level = logging.WARNING if reasons else logging.INFO
        because = f" ({'; '.join(reasons)})" if reasons else ""
        _logger.log(level, "attention backend %s on %s%s", backend.name, device, because)
        return backend
    raise BackendUnavailable("; ".join(reasons))


def _make(name: str, device: torch.device) -> Backend:
    """Import a backend's package, make it, check it if it is a library's; BackendUnavailable when it cannot serve."""
    module_name = MODULES[name]
    if importlib.util.find_spec(module_name) is None:
        raise BackendUnavailable("not part of this install")
    backend: Backend = importlib.import_module(module_name).make_backend()
    if name in PROBES:
        probe(backend, device, **PROBES[name])
    return backend
