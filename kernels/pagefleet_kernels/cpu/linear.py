"""Linears by the library's own kernel (src/linear.h): a row has the same bits whatever stands beside it."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from pagefleet_kernels.checks import check_plain, refuse
from pagefleet_kernels.cpu.calls import DTYPE_CODES, GroupedLinearCall, LinearCall
from pagefleet_kernels.cpu.library import Library

PANEL_OUTPUTS = 64
"""Of the widest level; the others' panels divide it."""


@dataclass(frozen=True, slots=True)
class RowLinear(ABC):
    """x [..., K] in dtype -> x @ weight.T + bias, [..., N], in out_dtype, by one function of the library."""

    FUNCTION: ClassVar[str]

    library: Library
    packed: torch.Tensor
    """The weight in the library's layout."""
    bias: torch.Tensor | None
    in_features: int
    out_features: int
    num_threads: Callable[[], int]
    """Threads that a call uses at most."""
    dtype: torch.dtype
    """Of x."""
    out_dtype: torch.dtype
    """dtype, or float32: the sums as they are, not rounded."""

    @abstractmethod
    def call(
        self, x: torch.Tensor, out: torch.Tensor, *, num_rows: int = 0, num_threads: int = 0
    ) -> LinearCall | GroupedLinearCall:
        """FUNCTION's argument: rows of x [R, K], last dimension contiguous, into out [R, N], contiguous."""

    def _linear_call(self, x: torch.Tensor, out: torch.Tensor, num_rows: int, num_threads: int) -> LinearCall:
        return LinearCall(
            x=x.data_ptr(),
            out=out.data_ptr(),
            weight=self.packed.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            x_row_stride=x.stride(0),
            num_rows=num_rows,
            in_features=self.in_features,
            out_features=self.out_features,
            num_threads=num_threads,
            wide_out=int(self.out_dtype == torch.float32),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Raises KernelArgumentError for another width or dtype than it was packed for."""
        want = f"a tensor [..., {self.in_features}] of {self.dtype} on the CPU"
        if not isinstance(x, torch.Tensor):
            raise refuse("x", f"a {type(x).__name__}", want)
        if x.dim() == 0 or x.shape[-1] != self.in_features or x.dtype != self.dtype or x.device.type != "cpu":
            raise refuse("x", f"{tuple(x.shape)} {x.dtype} on {x.device}", want)
        check_plain("x", x)
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty(rows.shape[0], self.out_features, dtype=self.out_dtype)
        call = self.call(rows, out, num_rows=rows.shape[0], num_threads=self.num_threads())
        self.library.call(self.FUNCTION, ctypes.byref(call), DTYPE_CODES[x.dtype])
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.out_features)


@dataclass(frozen=True, slots=True)
class PackedLinear(RowLinear):
    """With a weight in dtype."""

    FUNCTION = "pagefleet_linear"

    @classmethod
    def pack(
        cls,
        library: Library,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        num_threads: Callable[[], int],
        *,
        out_dtype: torch.dtype | None = None,
    ) -> "PackedLinear | None":
        """Copy the weight [N, K] into the library's layout; None for dtypes or an odd K that it does not hold."""
        out_features, in_features = weight.shape
        code = DTYPE_CODES.get(weight.dtype)
        if code is None or in_features % (4 // weight.dtype.itemsize) or weight.device.type != "cpu":
            return None
        out_dtype = weight.dtype if out_dtype is None else out_dtype
        if out_dtype not in (weight.dtype, torch.float32):
            return None
        source = weight.detach()
        if source.stride(1) != 1:
            source = source.contiguous()
        padded = -(-out_features // PANEL_OUTPUTS) * PANEL_OUTPUTS
        packed = library.weights.take(padded * in_features * weight.dtype.itemsize).view(weight.dtype)
        library.call(
            "pagefleet_pack_linear",
            source.data_ptr(),
            source.stride(0),
            out_features,
            in_features,
            packed.data_ptr(),
            num_threads(),
            code,
        )
        own_bias = None if bias is None else bias.detach().clone().contiguous()
        return cls(
            library, packed, own_bias, in_features, out_features, num_threads, dtype=weight.dtype, out_dtype=out_dtype
        )

    def call(self, x: torch.Tensor, out: torch.Tensor, *, num_rows: int = 0, num_threads: int = 0) -> LinearCall:
        """As RowLinear."""
        return self._linear_call(x, out, num_rows, num_threads)
