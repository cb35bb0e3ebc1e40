"""One rank's part of a decoder: some of the heads and of the MLP's width. Norms, embedding and output layer are whole
on every rank; attention's and the MLP's results are summed over the ranks (Megatron-LM, 1909.08053)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from pagefleet_server.model_errors import ModelRefused
from pagefleet_server.models.fused import weight_names
from pagefleet_server.models.fused.spec import DecoderSpec
from pagefleet_server.models.fused.weight_sources import Shape, WeightSource


class Group(Protocol):
    """The ranks that hold one model together."""

    @property
    def rank(self) -> int:
        """0 .. size - 1."""

    @property
    def size(self) -> int:
        """Ranks, >= 2."""

    def sum(self, rows: torch.Tensor) -> None:
        """rows [T, H] becomes the sum over all ranks, the same bits on each, a row's whatever stands beside it."""


def shard_spec(spec: DecoderSpec, size: int) -> DecoderSpec:
    """What each of `size` ranks computes. Raises ModelRefused for what does not divide."""
    advice = f"--tensor-parallel-size {size}: "
    if spec.width_norm:
        raise ModelRefused(f"{advice}{spec.architecture} norms queries over all heads; its heads cannot be split")
    for what, number in (("query heads", spec.num_q_heads), ("MLP outputs", spec.intermediate_size)):
        if number % size:
            raise ModelRefused(f"{advice}its {number} {what} do not divide by {size}; choose a divisor")
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        raise ModelRefused(f"{advice}its {spec.num_kv_heads} kv heads neither divide by it nor divide it")
    return replace(
        spec,
        num_q_heads=spec.num_q_heads // size,
        num_kv_heads=max(1, spec.num_kv_heads // size),
        intermediate_size=spec.intermediate_size // size,
    )


@dataclass(frozen=True, slots=True)
class ShardedSource:
    """A rank's part of a whole checkpoint."""

    whole: WeightSource
    spec: DecoderSpec
    """Of the whole."""
    rank: int
    size: int

    def shapes(self) -> Mapping[str, Shape]:
        """Of the parts."""
        return weight_names.expected(shard_spec(self.spec, self.size))

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor is read, the rest let go."""
        weight = self.whole.read(name, dtype)
        module, _, kind = name.rpartition(".")
        part = module.rpartition(".")[2]
        if part in ("o_proj", "down_proj", "c_proj"):
            if kind == "weight":
                return self._cut(weight, dim=1).contiguous()
            return weight if self.rank == 0 else torch.zeros_like(weight)  # added once
        if part in ("q_proj", "gate_proj", "up_proj", "c_fc"):
            return self._cut(weight).contiguous()
        if part in ("k_proj", "v_proj"):
            return self._cut_kv(weight).contiguous()
        if part == "gate_up_proj":
            return torch.cat([self._cut(half) for half in weight.chunk(2)])
        if part == "qkv_proj":
            query, key, value = torch.split(weight, [self.spec.q_width, self.spec.kv_width, self.spec.kv_width])
            return torch.cat([self._cut(query), self._cut_kv(key), self._cut_kv(value)])
        return weight

    def _cut(self, weight: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return weight.chunk(self.size, dim)[self.rank]

    def _cut_kv(self, weight: torch.Tensor) -> torch.Tensor:
        """Fewer heads than ranks: several ranks hold the same one."""
        heads = self.spec.num_kv_heads
        if heads >= self.size:
            return self._cut(weight)
        return weight.chunk(heads)[self.rank * heads // self.size]
