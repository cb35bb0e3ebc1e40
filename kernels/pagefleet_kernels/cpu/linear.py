"""Linears by the library's own kernel (src/linear.h): a row has the same bits whatever stands beside it."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagefleet_kernels.cpu.calls import DTYPE_CODES, LinearCall
from pagefleet_kernels.cpu.library import Library
from pagefleet_kernels.errors import KernelArgumentError

PANEL_OUTPUTS = 64
"""Of the widest level; the others' panels divide it."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """x [..., K] in the weight's dtype -> x @ weight.T + bias, [..., N], in out_dtype."""

    library: Library
    packed: torch.Tensor
    """[ceil(N / 64) * 64 * K] in the library's layout."""
    bias: torch.Tensor | None
    in_features: int
    out_features: int
    num_threads: Callable[[], int]
    """Threads that a call uses at most."""
    out_dtype: torch.dtype
    """The weight's, or float32: the sums as they are, not rounded."""

    @property
    def dtype(self) -> torch.dtype:
        """Of x."""
        return self.packed.dtype

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
        packed = torch.empty(padded * in_features, dtype=weight.dtype)
        library.advise_huge_pages(packed.data_ptr(), packed.nbytes)
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
        return cls(library, packed, own_bias, in_features, out_features, num_threads, out_dtype)

    def call(self, x: torch.Tensor, out: torch.Tensor) -> LinearCall:
        """Of all rows of x [R, K], last dimension contiguous, into out [R, N], contiguous; rows and threads are 0."""
        return LinearCall(
            x=x.data_ptr(),
            out=out.data_ptr(),
            weight=self.packed.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            x_row_stride=x.stride(0),
            in_features=self.in_features,
            out_features=self.out_features,
            wide_out=int(self.out_dtype == torch.float32),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Raises KernelArgumentError for another width or dtype than the weight's."""
        if x.shape[-1] != self.in_features or x.dtype != self.packed.dtype or x.device.type != "cpu":
            raise KernelArgumentError(
                f"x is {tuple(x.shape)} {x.dtype} on {x.device}; it must be [..., {self.in_features}] "
                f"{self.packed.dtype} on the CPU"
            )
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty(rows.shape[0], self.out_features, dtype=self.out_dtype)
        call = self.call(rows, out)
        call.num_rows, call.num_threads = rows.shape[0], self.num_threads()
        self.library.call("pagefleet_linear", ctypes.byref(call), DTYPE_CODES[x.dtype])
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.out_features)
