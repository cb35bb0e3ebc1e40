"""Row-wise ops of a decoder layer and the sampler, by the library. Arguments are checked here.

All compute in float32 and round once to the tensors' dtype (float32 or bfloat16); a row never depends on another.
"""

import ctypes
from collections.abc import Callable

import torch

from pagefleet_kernels.checks import check_apart, check_rank, check_tensor, refuse
from pagefleet_kernels.cpu.cache import CpuCache
from pagefleet_kernels.cpu.calls import DTYPE_CODES, GateCall, NormCall, SampleCall
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
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        *,
        epsilon: float,
        weight_offset: float = 0.0,
    ) -> torch.Tensor:
        """RMS norm over the last dimension of h = x + residual [T, N], times weight [N] + weight_offset -> new [T, N].

        residual becomes h, rounded to the dtype (it is contiguous and does not overlap x); None: h = x. weight_offset
        is 1 for models that store weight - 1 (Gemma).
        """
        rows, width = _matrix("x", x)
        check_tensor("weight", weight, (width,), x.dtype, _CPU)
        if residual is not None:
            check_tensor("residual", residual, (rows, width), x.dtype, _CPU)
            _check_contiguous("residual", residual)
            check_apart("residual", residual, x=x)
        out = torch.empty(rows, width, dtype=x.dtype)
        call = NormCall(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            None,
            out.data_ptr(),
            x.stride(0),
            rows,
            width,
            self._num_threads(),
            0,
            epsilon,
            weight_offset,
            1.0,
        )
        self._library.call("pagefleet_add_norm", ctypes.byref(call), DTYPE_CODES[x.dtype])
        return out

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
            1,
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
        the running sum of probabilities, in id order, passes uniform float64 [T] in [0, 1), among what is left, in
        this order, by top_k int32 [T] (0: all; ties at the threshold are all kept), top_p float32 [T] (the smallest set
        of likeliest tokens, lower ids first among equals, whose share of what top_k left reaches top_p; 1: all) and
        min_p float32 [T] (probability at least min_p times the largest; 0: all).
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


def check_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: CpuCache,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
) -> None:
    """Refuse what does not fit together in CpuBackend.rope_write_kv."""
    shape, dtype = cache.shape, cache.dtype
    check_rank("query", query, "[T, Hq, D]")
    num_tokens, num_q_heads, _ = query.shape
    check_tensor("query", query, (num_tokens, num_q_heads, shape.head_dim), dtype, _CPU)
    check_tensor("key", key, (num_tokens, shape.num_kv_heads, shape.head_dim), dtype, _CPU)
    check_tensor("value", value, (num_tokens, shape.num_kv_heads, shape.v_head_dim), dtype, _CPU)
    for name, numbers in (("slot_mapping", slot_mapping), ("positions", positions)):
        check_tensor(name, numbers, (num_tokens,), torch.int64, _CPU)
        _check_contiguous(name, numbers)
    check_rank("cos_sin", cos_sin, "[P, R]")
    if cos_sin.shape[1] % 2 or cos_sin.shape[1] > shape.head_dim:
        raise refuse("cos_sin", f"of shape {tuple(cos_sin.shape)}", f"[P, R] with R even and <= {shape.head_dim}")
    check_tensor("cos_sin", cos_sin, tuple(cos_sin.shape), torch.float32, _CPU)
    _check_contiguous("cos_sin", cos_sin)
    for name, norm in (("query_norm", query_norm), ("key_norm", key_norm)):
        if norm is not None:
            check_tensor(name, norm, (shape.head_dim,), dtype, _CPU)


def _matrix(name: str, tensor: torch.Tensor) -> tuple[int, int]:
    check_rank(name, tensor, "[T, N]")
    _check_dtype(name, tensor)
    check_tensor(name, tensor, (tensor.shape[0], tensor.shape[1]), tensor.dtype, _CPU)
    return tensor.shape[0], tensor.shape[1]


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPE_CODES:
        raise refuse(name, f"of dtype {tensor.dtype}", f"of {' or '.join(str(dtype) for dtype in DTYPE_CODES)}")


def _check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise refuse(name, f"strided {tensor.stride()}", "contiguous")
