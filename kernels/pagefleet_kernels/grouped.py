"""Weights in their own scales: small integers in groups along K, with a scale and perhaps a minimum for each group."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from pagefleet_kernels.backend import Backend, LinearFunction
from pagefleet_kernels.checks import check_tensor, refuse

MAX_GROUP = 32
"""Elements of K that share a scale, at most."""
NUM_LEVELS = 16
"""That four bits can name."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """weight[n, k] = scales[n, k // group] * level[n, k] + minimums[n, k // group]."""

    codes: torch.Tensor
    """[N, K]. With levels uint8: the level's index, below 16; without int8: the level itself."""
    levels: tuple[int, ...] | None
    """16 numbers in -128..127, or None."""
    scales: torch.Tensor
    """[N, K / group], float16 or float32."""
    minimums: torch.Tensor | None = None
    """Likewise, in the scales' dtype; None: zero."""

    @property
    def shape(self) -> tuple[int, int]:
        """N, K."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group(self) -> int:
        """Elements of K that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def bits(self) -> int:
        """Of a level."""
        return 8 if self.levels is None else 4

    @property
    def num_bytes(self) -> int:
        """In a kernel's layout: levels in their bits, with scales and minimums."""
        minimums = 0 if self.minimums is None else self.minimums.nbytes
        return self.codes.numel() * self.bits // 8 + self.scales.nbytes + minimums

    def dequantize(self) -> torch.Tensor:
        """float32 [N, K]."""
        levels = self._bytes().codes.to(torch.float32)
        wide = self.scales.float().repeat_interleave(self.group, 1) * levels
        return wide if self.minimums is None else wide + self.minimums.float().repeat_interleave(self.group, 1)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "GroupedWeight":
        """change(codes), change(scales), change(minimums): other rows, or another order of them."""
        minimums = None if self.minimums is None else change(self.minimums)
        return replace(self, codes=change(self.codes), scales=change(self.scales), minimums=minimums)

    def _bytes(self) -> "GroupedWeight":
        """The same weight with its levels as they are."""
        if self.levels is None:
            return self
        table = torch.tensor(self.levels, dtype=torch.int8)
        return replace(self, codes=table[self.codes.long()], levels=None)

    def _like(self, group: int, dtype: torch.dtype, *, minimums: bool) -> "GroupedWeight":
        """The same weight with smaller groups, wider scales, or minimums of zero."""
        times = self.group // group
        scales = self.scales.to(dtype).repeat_interleave(times, 1)
        if self.minimums is not None:
            return replace(self, scales=scales, minimums=self.minimums.to(dtype).repeat_interleave(times, 1))
        return replace(self, scales=scales, minimums=torch.zeros_like(scales) if minimums else None)


def join(parts: list[GroupedWeight]) -> GroupedWeight:
    """One below the other, without rounding: in the parts' own form where they share one, else in one that holds them
    all. Raises KernelArgumentError for other widths."""
    first = parts[0]
    if any(part.shape[1] != first.shape[1] for part in parts):
        raise refuse("parts", f"{[part.shape for part in parts]}", "of one width")
    if any(part.levels != first.levels for part in parts):
        parts = [part._bytes() for part in parts]
    group = min(part.group for part in parts)
    wide = any(part.scales.dtype == torch.float32 for part in parts)
    minimums = any(part.minimums is not None for part in parts)
    alike = [part._like(group, torch.float32 if wide else torch.float16, minimums=minimums) for part in parts]
    lowest = [part.minimums for part in alike if part.minimums is not None]
    return GroupedWeight(
        codes=torch.cat([part.codes for part in alike]),
        levels=alike[0].levels,
        scales=torch.cat([part.scales for part in alike]),
        minimums=torch.cat(lowest) if lowest else None,
    )


@runtime_checkable
class GroupedPacker(Protocol):
    """A backend that multiplies by weights in their own scales. Optional: see pack_grouped."""

    def pack_grouped(
        self, weight: GroupedWeight, bias: torch.Tensor | None, *, dtype: torch.dtype, wide: bool = False
    ) -> LinearFunction | None:
        """See pack_grouped below."""


def pack_grouped(
    backend: Backend,
    weight: GroupedWeight,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    wide: bool = False,
) -> LinearFunction | None:
    """The linear x [..., K] in dtype -> [..., N] in dtype, or (wide) in float32; it holds its own copy.

    bias [N] in dtype, or None. None: this backend, or this dtype, has no such linear. Raises KernelArgumentError.
    """
    _check(weight)
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), dtype, weight.codes.device)
    if not isinstance(backend, GroupedPacker):
        return None
    return backend.pack_grouped(weight, bias, dtype=dtype, wide=wide)


def _check(weight: GroupedWeight) -> None:
    codes, scales, levels = weight.codes, weight.scales, weight.levels
    if codes.dim() != 2 or 0 in codes.shape:
        raise refuse("weight.codes", f"shape {tuple(codes.shape)}", "[N, K] with N, K >= 1")
    check_tensor("weight.codes", codes, tuple(codes.shape), torch.int8 if levels is None else torch.uint8, codes.device)
    if levels is not None:
        if len(levels) != NUM_LEVELS or not all(-128 <= level <= 127 for level in levels):
            raise refuse("weight.levels", levels, f"{NUM_LEVELS} numbers in -128..127")
        if int(codes.max()) >= NUM_LEVELS:
            raise refuse("weight.codes", f"up to {int(codes.max())}", f"below {NUM_LEVELS}")
    if scales.dtype not in (torch.float16, torch.float32):
        raise refuse("weight.scales", f"dtype {scales.dtype}", "float16 or float32")
    rows, width = codes.shape
    groups = scales.shape[1] if scales.dim() == 2 else 0
    if groups == 0 or width % groups or width // groups > MAX_GROUP or (width // groups) % 2:
        raise refuse("weight.scales", f"shape {tuple(scales.shape)}", f"[N, K / an even group <= {MAX_GROUP}]")
    check_tensor("weight.scales", scales, (rows, groups), scales.dtype, codes.device)
    if weight.minimums is not None:
        check_tensor("weight.minimums", weight.minimums, (rows, groups), scales.dtype, codes.device)
