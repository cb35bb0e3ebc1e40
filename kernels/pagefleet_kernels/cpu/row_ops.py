"""Row-wise ops of a decoder layer and the sampler, by the library. Arguments are checked here.

All compute in float32 and round once to the tensors' dtype (float32 or bfloat16); a row never depends on another.
"""

import ctypes
from collections.abc import Callable

import torch

from pagefleet_kernels.checks import check_tensor, refuse
from pagefleet_kernels.cpu.calls import DTYPE_CODES, GateCall, NormCall, RopeCall, SampleCall
from pagefleet_kernels.cpu.library import Library

_CPU = torch.device("cpu")
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class CpuRowOps:
    """Holds the library and where to ask for the thread count."""

    def __init__(self, library: Library, num_threads: Callable[[], int]) -> None:
        self._library = library
        self._num_threads = num_threads

    def add_rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        *,
        residual: torch.Tensor | None = None,
        weight_offset: float = 0.0,
    ) -> torch.Tensor:
        """h / sqrt(mean(h^2) + epsilon) * (weight + weight_offset) for x [T, N], weight [N] -> new [T, N].

        With residual [T, N], contiguous: h = residual + x, rounded to the dtype and left in residual (in place), which
        must not overlap x. Without: h = x. weight_offset is 1 for models that store weight - 1 (Gemma).
        """
        rows, width = _matrix("x", x)
        check_tensor("weight", weight, (width,), x.dtype, _CPU)
        if residual is not None:
            check_tensor("residual", residual, (rows, width), x.dtype, _CPU)
            _check_contiguous("residual", residual)
        out = torch.empty(rows, width, dtype=x.dtype)
        call = NormCall(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.stride(0),
            rows,
            width,
            self._num_threads(),
            epsilon,
            weight_offset,
        )
        self._library.call("pagefleet_add_rms_norm", ctypes.byref(call), DTYPE_CODES[x.dtype])
        return out

    def rope(
        self, rows: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, interleaved: bool = False
    ) -> None:
        """Rotate rows [T, H, D] in place by their positions int64 [T].

        table float32 [P, R], contiguous, R even and <= D: for each position the cosines of R / 2 angles, then their
        sines, scaling factors included. The first R elements of a head are rotated: element i with i + R / 2, or
        (interleaved) each even element with the next one. Raises KernelArgumentError for a position outside [0, P).
        """
        if rows.dim() != 3:
            raise refuse("rows", f"of shape {tuple(rows.shape)}", "[T, H, D]")
        num_rows, num_heads, head_dim = rows.shape
        _check_dtype("rows", rows)
        check_tensor("rows", rows, (num_rows, num_heads, head_dim), rows.dtype, _CPU)
        check_tensor("positions", positions, (num_rows,), torch.int64, _CPU)
        if table.dim() != 2 or table.shape[1] % 2 or table.shape[1] > head_dim:
            raise refuse("table", f"of shape {tuple(table.shape)}", f"[P, R] with R even and <= {head_dim}")
        check_tensor("table", table, tuple(table.shape), torch.float32, _CPU)
        _check_contiguous("table", table)
        _check_contiguous("positions", positions)
        call = RopeCall(
            rows.data_ptr(),
            positions.data_ptr(),
            table.data_ptr(),
            rows.stride(0),
            rows.stride(1),
            num_rows,
            num_heads,
            table.shape[1],
            table.shape[0],
            int(interleaved),
            self._num_threads(),
        )
        self._library.call("pagefleet_rope", ctypes.byref(call), DTYPE_CODES[rows.dtype])

    def gated(self, gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        """activation(gate) * up for gate_up [T, 2N] (gates, then ups) -> new [T, N]; see ACTIVATIONS."""
        rows, both = _matrix("gate_up", gate_up)
        if both % 2:
            raise refuse("gate_up", f"of width {both}", "even: gates, then ups")
        if activation not in ACTIVATIONS:
            raise refuse("activation", repr(activation), f"one of {', '.join(ACTIVATIONS)}")
        out = torch.empty(rows, both // 2, dtype=gate_up.dtype)
        call = GateCall(
            gate_up.data_ptr(),
            out.data_ptr(),
            gate_up.stride(0),
            rows,
            both // 2,
            ACTIVATIONS[activation],
            self._num_threads(),
        )
        self._library.call("pagefleet_gate", ctypes.byref(call), DTYPE_CODES[gate_up.dtype])
        return out

    def sample(
        self,
        logits: torch.Tensor,
        *,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        """One token per row of logits [T, V] -> int64 [T].

        temperature float32 [T]: 0 is greedy (the first NaN, else the lowest id of the largest). Else the token where
        the running sum of probabilities, in id order, passes uniform float64 [T] in [0, 1), among what is left by
        min_p float32 [T] (probability at least min_p times the largest), top_k int32 [T] (0: all; ties at the
        threshold are all kept) and top_p float32 [T] (the smallest set of likeliest tokens, lower ids first among
        equals, whose share of what min_p and top_k left reaches top_p; 1: all).
        """
        rows, vocabulary = _matrix("logits", logits)
        if vocabulary < 1:
            raise refuse("logits", "without a vocabulary", "[T, V] with V >= 1")
        for name, tensor, dtype in (
            ("temperature", temperature, torch.float32),
            ("top_k", top_k, torch.int32),
            ("top_p", top_p, torch.float32),
            ("min_p", min_p, torch.float32),
            ("uniform", uniform, torch.float64),
        ):
            check_tensor(name, tensor, (rows,), dtype, _CPU)
            _check_contiguous(name, tensor)
        tokens = torch.empty(rows, dtype=torch.int64)
        call = SampleCall(
            logits.data_ptr(),
            temperature.data_ptr(),
            top_k.data_ptr(),
            top_p.data_ptr(),
            min_p.data_ptr(),
            uniform.data_ptr(),
            tokens.data_ptr(),
            logits.stride(0),
            rows,
            vocabulary,
            self._num_threads(),
        )
        self._library.call("pagefleet_sample", ctypes.byref(call), DTYPE_CODES[logits.dtype])
        return tokens


def _matrix(name: str, tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.dim() != 2:
        raise refuse(name, f"of shape {tuple(tensor.shape)}", "a matrix")
    _check_dtype(name, tensor)
    check_tensor(name, tensor, (tensor.shape[0], tensor.shape[1]), tensor.dtype, _CPU)
    return tensor.shape[0], tensor.shape[1]


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPE_CODES:
        raise refuse(name, f"of dtype {tensor.dtype}", f"of {' or '.join(str(dtype) for dtype in DTYPE_CODES)}")


def _check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise refuse(name, f"strided {tensor.stride()}", "contiguous")
