"""Whether decode steps are captured as CUDA graphs here, what they will take, and capturing them."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from pagefleet_kernels.backend import Backend, Capturable, KVCache
from pagefleet_server.models.executor import Executor
from pagefleet_server.models.fused.decoder import FusedDecoder
from pagefleet_server.runner.cuda_graph import CudaGraphMaker
from pagefleet_server.runner.decode_graphs import DecodeGraphs, GraphedModel, GraphMaker, capture_all, estimated_bytes
from pagefleet_server.runner.kv_memory import KVPlan, allocate_kv, bytes_per_block
from pagefleet_server.runner.tensor_parallel import RankGroup

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphSetup:
    """For a model that can be captured."""

    model: FusedDecoder
    backend: Backend
    max_rows: int
    """Sequences of one step at most."""
    new_maker: Callable[[], GraphMaker]
    """A maker's graphs share memory that must not be used again once they are gone: each set of graphs has its own."""
    kv_dtype: torch.dtype

    def estimate(self, *, block_size: int, max_seq_len: int) -> int:
        """Bytes that all graphs will take, found on a KV cache of a block for each sequence, which is let go again."""
        layers = self.model.layers
        per_block = bytes_per_block(layers, block_size, backend=self.backend, dtype=self.kv_dtype)
        plan = KVPlan(block_size, self.max_rows, per_block)
        caches = allocate_kv(layers, plan, backend=self.backend, dtype=self.kv_dtype, device=self.model.device)
        return estimated_bytes(self._graphed(caches, plan, max_seq_len), self.new_maker())

    def capture(self, caches: Sequence[KVCache], plan: KVPlan, *, max_seq_len: int) -> DecodeGraphs | None:
        """On the cache that will be served from; None when that does not work (the log says why)."""
        return capture_all(self._graphed(caches, plan, max_seq_len), self.new_maker())

    def _graphed(self, caches: Sequence[KVCache], plan: KVPlan, max_seq_len: int) -> GraphedModel:
        assert isinstance(self.backend, Capturable)
        lengths = self.backend.capture_lengths(max_seq_len)
        return GraphedModel(self.model, self.backend, caches, plan, self.max_rows, lengths)


def graph_setup(
    mode: str,
    model: Executor,
    backend: Backend,
    *,
    max_rows: int,
    kv_dtype: torch.dtype,
    group: RankGroup | None,
    new_maker: Callable[[], GraphMaker] | None = None,
) -> GraphSetup | None:
    """None: every step is eager; on CUDA the log says why. mode: auto or off. new_maker: not the device's own."""
    if model.device.type != "cuda" and new_maker is None:
        return None
    reason = why_eager(mode, model, backend, num_ranks=1 if group is None else group.size)
    if reason is not None or not isinstance(model, FusedDecoder):
        _logger.info("CUDA graphs are off: %s", reason)
        return None
    return GraphSetup(model, backend, max_rows, new_maker or partial(CudaGraphMaker, model.device), kv_dtype)


def why_eager(mode: str, model: Executor, backend: Backend, *, num_ranks: int) -> str | None:
    """None: decode steps may be captured."""
    if mode == "off":
        return "--cuda-graphs off asks for it"
    if num_ranks > 1:
        return "a step is sent to other ranks, which is not captured"
    if not isinstance(model, FusedDecoder):
        return f"the {model.executor} executor looks at numbers on the host"
    if not isinstance(backend, Capturable):
        return f"the {backend.name} backend cannot be captured"
    return None
