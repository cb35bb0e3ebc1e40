"""What memory is for: every class of bytes, measured or planned before the engine is ready.

A process of a CPU ends with a kill when memory runs out, not with an error, so what serving will need is found out at
the start: the largest step runs once, on a small cache, and what it takes at its peak is set aside.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagefleet_server import host_memory
from pagefleet_server.model_errors import ModelError

_logger = logging.getLogger(__name__)

MARGIN_BYTES = 128 * 1024**2
"""On a CPU, for what grows with the load and is no step's: requests, their texts and grammars, buffers of the sockets,
gaps in the allocator's heap. Of engine and API process together."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Before the KV cache is there. On CUDA: of the device, without margin and API process."""

    limit: int
    """Of the machine or container; on CUDA the device's memory."""
    process: int
    """Held now by the engine beside the weights: libraries and the runtime; on CUDA everything that is taken."""
    api: int
    """Held now by the API process, which shares the container."""
    weights: int
    activations: int
    """The largest step's peak."""
    margin: int
    graphs: int = 0
    """CUDA graphs of decode steps, estimated."""

    @property
    def left(self) -> int:
        """For the KV cache; negative when there is too little for the rest already."""
        return self.limit - self.process - self.api - self.weights - self.activations - self.margin - self.graphs

    def check(self, kv_bytes: int) -> None:
        """Log every class. Raises ModelError when they exceed the limit together."""
        classes = {
            "weights": self.weights,
            "KV": kv_bytes,
            "activations": self.activations,
            "engine process": self.process,
            "API process": self.api,
            "margin": self.margin,
            **({"CUDA graphs": self.graphs} if self.graphs else {}),
        }
        told = ", ".join(f"{name} {count}" for name, count in classes.items())
        if kv_bytes > self.left:
            raise ModelError(
                f"the KV cache of {kv_bytes} bytes does not fit: {self.left} are left of {self.limit}, the limit of"
                f" machine or container ({told}); lower --kv-cache-memory, --num-kv-blocks or --max-num-batched-tokens,"
                " or give more memory"
            )
        _logger.info("memory in bytes: %s; together %d of %d", told, self.limit - self.left + kv_bytes, self.limit)


def measure(
    device: torch.device,
    *,
    weights: int,
    scratch: int,
    largest_step: Callable[[], object],
    num_ranks: int = 1,
    leads: bool = True,
) -> MemoryBudget:
    """The budget of a model that is loaded and has run before, without its KV cache. `scratch`: bytes of what is there
    for the largest step alone, beside its activations. On a CPU each of several ranks gets an equal part of the limit;
    the one that `leads` is the child of the API process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        largest_step()
        activations = torch.cuda.max_memory_allocated(device) - before
        return MemoryBudget(total, max(0, total - free - weights - scratch), 0, weights, activations, 0)
    host_memory.restart_peak()
    before = host_memory.resident_bytes()
    largest_step()
    peak = max(host_memory.peak_bytes(), host_memory.resident_bytes())
    return MemoryBudget(
        limit=host_memory.limit_bytes() // num_ranks,
        process=max(0, before - weights - scratch),
        api=host_memory.resident_bytes(str(os.getppid())) if leads else 0,
        weights=weights,
        activations=max(0, peak - before),
        margin=MARGIN_BYTES,
    )
