"""A step's attention on the paged KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagefleet_kernels import ops
from pagefleet_kernels.backend import Backend, KVCache
from pagefleet_kernels.batch import AttentionBatch
from pagefleet_server.models.layer_call import LayerCall


@dataclass(frozen=True, slots=True)
class PagedContext:
    """An AttentionContext (see models.layer_call) over one batch, checked before it gets here."""

    backend: Backend
    caches: Sequence[KVCache]
    """By layer index."""
    batch: AttentionBatch

    def attend(self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write the rows' K and V, then attend: every layer has the whole batch's KV before it reads."""
        cache = self.caches[call.layer_index]
        ops.write_kv(self.backend, cache, key, value, self.batch.slot_mapping, check_bounds=False)
        return ops.paged_attention(
            self.backend,
            query,
            cache,
            self.batch,
            scale=call.scale,
            sliding_window=call.sliding_window,
            softcap=call.softcap,
            sinks=call.sinks,
            check_bounds=False,
        )
