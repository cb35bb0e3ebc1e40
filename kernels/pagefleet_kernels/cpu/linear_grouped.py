"""Linears whose weights keep their own scales (src/linear_q.h): as exact as the weights, a fraction of their bytes."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagefleet_kernels.cpu.calls import DTYPE_CODES, GroupedLinearCall, PackGroupedCall
from pagefleet_kernels.cpu.library import Library
from pagefleet_kernels.cpu.linear import PANEL_OUTPUTS, RowLinear
from pagefleet_kernels.grouped import NUM_LEVELS, GroupedWeight


@dataclass(frozen=True, slots=True)
class GroupedLinear(RowLinear):
    """With a weight of small integers and their scales."""

    FUNCTION = "pagefleet_grouped_linear"

    group: int
    levels: tuple[int, ...] | None
    wide_scales: bool
    has_minimums: bool

    @classmethod
    def pack(
        cls,
        library: Library,
        weight: GroupedWeight,
        bias: torch.Tensor | None,
        num_threads: Callable[[], int],
        *,
        dtype: torch.dtype,
        wide: bool = False,
    ) -> "GroupedLinear | None":
        """Copy a checked weight into the library's layout; None for a dtype that it does not hold."""
        if dtype not in DTYPE_CODES or weight.codes.device.type != "cpu":
            return None
        codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
        minimums = None if weight.minimums is None else weight.minimums.contiguous()
        (out_features, in_features), groups = weight.shape, scales.shape[1]
        of_group = scales.itemsize * (1 if minimums is None else 2)
        padded = -(-out_features // PANEL_OUTPUTS) * PANEL_OUTPUTS
        packed = library.weights.take(padded * (in_features * weight.bits // 8 + groups * of_group))
        call = PackGroupedCall(
            codes.data_ptr(),
            scales.data_ptr(),
            None if minimums is None else minimums.data_ptr(),
            packed.data_ptr(),
            out_features,
            in_features,
            weight.group,
            weight.bits,
            int(scales.dtype == torch.float32),
            num_threads(),
        )
        library.call("pagefleet_pack_grouped", ctypes.byref(call))
        return cls(
            library=library,
            packed=packed,
            bias=None if bias is None else bias.detach().clone().contiguous(),
            in_features=in_features,
            out_features=out_features,
            group=weight.group,
            levels=weight.levels,
            wide_scales=scales.dtype == torch.float32,
            has_minimums=minimums is not None,
            num_threads=num_threads,
            dtype=dtype,
            out_dtype=torch.float32 if wide else dtype,
        )

    def call(self, x: torch.Tensor, out: torch.Tensor, *, num_rows: int = 0, num_threads: int = 0) -> GroupedLinearCall:
        """As RowLinear."""
        levels = (0,) * NUM_LEVELS if self.levels is None else self.levels
        return GroupedLinearCall(
            linear=self._linear_call(x, out, num_rows, num_threads),
            group=self.group,
            bits=8 if self.levels is None else 4,
            wide_scales=int(self.wide_scales),
            has_minimums=int(self.has_minimums),
            levels=(ctypes.c_int8 * NUM_LEVELS)(*levels),
        )
