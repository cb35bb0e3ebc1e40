"""How many KV blocks a model gets."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from pagefleet_kernels import ops
from pagefleet_kernels.backend import Backend, KVCache
from pagefleet_kernels.batch import KVShape
from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.layer_spec import LayerSpec
from pagefleet_server.runner.memory_budget import MemoryBudget
from pagefleet_server.settings import CacheSettings

DEFAULT_CPU_BYTES = 1024**3
"""KV bytes on a CPU when nothing is asked for, and so much is there."""
KV_CACHE_DTYPES: Mapping[str, torch.dtype | None] = MappingProxyType(
    {"auto": None, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
)
"""Values of --kv-cache-dtype; None: the model's own."""
DEFAULT_GPU_PART = 0.9
"""Of a GPU's memory to use in all, when nothing is asked for."""


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The KV cache's size."""

    block_size: int
    num_blocks: int
    """Usable blocks; the null block comes on top."""
    bytes_per_block: int
    """Over all layers, K and V."""

    @property
    def num_bytes(self) -> int:
        """All blocks, the null block included."""
        return (self.num_blocks + 1) * self.bytes_per_block


def plan_kv(
    layers: Sequence[LayerSpec],
    settings: CacheSettings,
    budget: MemoryBudget,
    *,
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device,
) -> KVPlan:
    """num_kv_blocks, else what kv_cache_memory_bytes holds, else the device's default. ModelError for no room."""
    per_block = bytes_per_block(layers, settings.block_size, backend=backend, dtype=dtype)
    if settings.num_kv_blocks is not None:
        if settings.num_kv_blocks < 1:
            raise ModelError(f"--num-kv-blocks {settings.num_kv_blocks}: must be >= 1")
        return KVPlan(settings.block_size, settings.num_kv_blocks, per_block)
    given = settings.kv_cache_memory_bytes
    memory = given if given is not None else _default_bytes(settings, budget, device)
    num_blocks = memory // per_block - 1
    if num_blocks < 1:
        raise ModelError(
            f"the KV cache gets {memory} bytes, but two blocks (one is the null block) of {settings.block_size} tokens "
            f"take {2 * per_block}; raise --kv-cache-memory (or --gpu-memory-utilization) or lower --block-size"
        )
    return KVPlan(settings.block_size, num_blocks, per_block)


def bytes_per_block(layers: Sequence[LayerSpec], block_size: int, *, backend: Backend, dtype: torch.dtype) -> int:
    """Over all layers, K and V."""
    return sum(ops.bytes_per_block(backend, kv_shape(layer), block_size=block_size, dtype=dtype) for layer in layers)


def kv_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """What --kv-cache-dtype asks for. Raises ModelError."""
    if name not in KV_CACHE_DTYPES:
        raise ModelError(f"--kv-cache-dtype {name!r}: expected one of {', '.join(KV_CACHE_DTYPES)}")
    return KV_CACHE_DTYPES[name] or model_dtype


def allocate_kv(
    layers: Sequence[LayerSpec], plan: KVPlan, *, backend: Backend, dtype: torch.dtype, device: torch.device
) -> tuple[KVCache, ...]:
    """One cache per layer. Raises ModelError when memory cannot hold it; on a CPU ask the budget before: host memory
    ends with a kill, not an error."""
    try:
        return tuple(
            ops.allocate(
                backend,
                kv_shape(layer),
                num_blocks=plan.num_blocks + 1,
                block_size=plan.block_size,
                dtype=dtype,
                device=device,
            )
            for layer in layers
        )
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        raise ModelError(
            f"the KV cache of {plan.num_bytes} bytes cannot be allocated on {device}: {str(error)[:200]}; "
            "lower --kv-cache-memory or --num-kv-blocks"
        ) from error


def kv_shape(layer: LayerSpec) -> KVShape:
    """The kernels' view of a layer."""
    return KVShape(num_kv_heads=layer.num_kv_heads, head_dim=layer.head_dim, v_head_dim=layer.v_head_dim)


def _default_bytes(settings: CacheSettings, budget: MemoryBudget, device: torch.device) -> int:
    """A part of the memory, less what is taken; on a CPU, where nobody asked for a part, DEFAULT_CPU_BYTES or what is
    there: other processes may want the rest."""
    part = settings.gpu_memory_utilization
    if device.type != "cuda" and part is None:
        return max(0, min(DEFAULT_CPU_BYTES, budget.left))
    part = DEFAULT_GPU_PART if part is None else part
    return max(0, budget.left - math.ceil((1 - part) * budget.limit))
