"""Linears whose weights keep their own scales (src/linear_q.h): as exact as the weights, a fraction of their bytes."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagefleet_kernels.cpu.calls import DTYPE_CODES, GroupedLinearCall, PackGroupedCall
from pagefleet_kernels.cpu.library import Library
from pagefleet_kernels.cpu.linear import PANEL_OUTPUTS
from pagefleet_kernels.errors import KernelArgumentError
from pagefleet_kernels.grouped import NUM_LEVELS, GroupedWeight


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """x [..., K] in dtype -> x @ weight.T + bias, [..., N], in out_dtype."""

    library: Library
    packed: torch.Tensor
    """uint8, in the library's layout."""
    bias: torch.Tensor | None
    in_features: int
    out_features: int
    group: int
    levels: tuple[int, ...] | None
    wide_scales: bool
    has_minimums: bool
    num_threads: Callable[[], int]
    """Threads that a call uses at most."""
    dtype: torch.dtype
    out_dtype: torch.dtype
    """dtype, or float32: the sums as they are, not rounded."""

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
        packed = torch.empty(padded * (in_features * weight.bits // 8 + groups * of_group), dtype=torch.uint8)
        library.advise_huge_pages(packed.data_ptr(), packed.nbytes)
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

    def call(self, x: torch.Tensor, out: torch.Tensor) -> GroupedLinearCall:
        """Of all rows of x [R, K], last dimension contiguous, into out [R, N], contiguous; rows and threads are 0."""
        levels = (0,) * NUM_LEVELS if self.levels is None else self.levels
        return GroupedLinearCall(
            x=x.data_ptr(),
            out=out.data_ptr(),
            weight=self.packed.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            x_row_stride=x.stride(0),
            in_features=self.in_features,
            out_features=self.out_features,
            wide_out=int(self.out_dtype == torch.float32),
            group=self.group,
            bits=8 if self.levels is None else 4,
            wide_scales=int(self.wide_scales),
            has_minimums=int(self.has_minimums),
            levels=(ctypes.c_int8 * NUM_LEVELS)(*levels),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Raises KernelArgumentError for another width or dtype than it was packed for."""
        if x.shape[-1] != self.in_features or x.dtype != self.dtype or x.device.type != "cpu":
            raise KernelArgumentError(
                f"x is {tuple(x.shape)} {x.dtype} on {x.device}; it must be [..., {self.in_features}] "
                f"{self.dtype} on the CPU"
            )
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty(rows.shape[0], self.out_features, dtype=self.out_dtype)
        call = self.call(rows, out)
        call.num_rows, call.num_threads = rows.shape[0], self.num_threads()
        self.library.call("pagefleet_grouped_linear", ctypes.byref(call), DTYPE_CODES[x.dtype])
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.out_features)
