"""A kernel launch as a value: planned by pure code, run in one place, inspected by the compile checks."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton


@dataclass(frozen=True, slots=True)
class Device:
    """What the choice of a configuration depends on."""

    capability: int
    """Compute capability x 10: 80, 90, 100; 0 is Triton's interpreter."""
    shared_bytes: int
    """Shared memory that one program may take."""

    @staticmethod
    def of(device: torch.device) -> "Device":
        """The properties of a CUDA device; any other is the interpreter's."""
        if device.type != "cuda":
            return INTERPRETER
        return _cuda_device(torch.cuda.current_device() if device.index is None else device.index)


INTERPRETER = Device(capability=0, shared_bytes=1 << 30)
AMPERE = Device(capability=80, shared_bytes=163 * 1024)
ADA = Device(capability=89, shared_bytes=99 * 1024)
HOPPER = Device(capability=90, shared_bytes=227 * 1024)
BLACKWELL = Device(capability=100, shared_bytes=227 * 1024)


@cache
def _cuda_device(index: int) -> Device:
    major, minor = torch.cuda.get_device_capability(index)
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return Device(capability=major * 10 + minor, shared_bytes=properties["max_shared_mem"])


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel, its grid and everything it is called with."""

    kernel: Any
    """The `triton.jit` function."""
    grid: tuple[int, ...]
    """Programs per axis; a zero means that there is nothing to do."""
    arguments: Mapping[str, Any]
    """Run-time arguments by name: tensors, numbers, None."""
    constants: Mapping[str, Any]
    """Compile-time arguments by name."""
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options. Fused multiply-adds are asked for by name: Triton's default for them is about to change,
        and with it the last bits of every result."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


def run(launch: Launch, device: torch.device) -> None:
    """Enqueue it on the current stream of the device that its tensors are on."""
    if 0 in launch.grid:
        return
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        with torch.cuda.device(device):
            _enqueue(launch)
    else:
        _enqueue(launch)


def _enqueue(launch: Launch) -> None:
    launch.kernel[launch.grid](**launch.arguments, **launch.constants, **launch.options)
