"""How a model's layers reach attention: the step's context, and what a layer hands to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import torch

from pagefleet_kernels.backend import Backend, KVCache
from pagefleet_kernels.batch import AttentionBatch


@dataclass(frozen=True, slots=True)
class LayerCall:
    """How one layer calls attention."""

    layer_index: int
    scale: float
    """Factor on the scores."""
    sliding_window: int | None
    """Keys k with position - k < window are seen; None: all."""
    softcap: float | None
    sinks: torch.Tensor | None
    """[Hq]: one logit per head that joins the softmax; None: none."""
    unknown: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """Keyword arguments that we do not know and that are not None: the gate refuses a model that passes any."""


class AttentionContext(Protocol):
    """What a step's layers do with their rows."""

    def attend(self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [T, Hq, D], key [T, Hkv, D] (after RoPE), value [T, Hkv, Dv] -> [T, Hq, Dv]."""


class StepContext(AttentionContext, Protocol):
    """An attention context over a paged cache, for executors that drive the kernels themselves."""

    @property
    def backend(self) -> Backend:
        """Whose caches they are."""

    @property
    def caches(self) -> Sequence[KVCache]:
        """By layer index; the same object in every step."""

    @property
    def batch(self) -> AttentionBatch:
        """The step's rows, checked."""
