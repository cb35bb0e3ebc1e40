"""A model's step as one call: its ops are recorded once, over buffers of their own, and run for any number of rows.

What changes from step to step (rows, threads, the batch's arrays) is written into all calls of a kind at once, through
numpy's view of their memory: a step costs some ten microseconds of Python, whatever the number of layers.
"""

import ctypes
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch

from pagefleet_kernels.backend import KVCache, LinearFunction
from pagefleet_kernels.batch import AttentionBatch
from pagefleet_kernels.checks import (
    INT32_MAX,
    check_apart,
    check_batch_form,
    check_positive,
    check_rank,
    check_score_rule,
    check_tensor,
    refuse,
)
from pagefleet_kernels.cpu.cache import CpuCache
from pagefleet_kernels.cpu.calls import (
    DTYPE_CODES,
    OP_KINDS,
    AttentionCall,
    GateCall,
    GroupedLinearCall,
    LinearCall,
    NormCall,
    Op,
    RopeCall,
    WriteCall,
)
from pagefleet_kernels.cpu.library import Library
from pagefleet_kernels.cpu.linear import RowLinear
from pagefleet_kernels.cpu.row_ops import ACTIVATIONS, check_rope
from pagefleet_kernels.errors import BackendUnavailable

_CPU = torch.device("cpu")
_Call = LinearCall | GroupedLinearCall | NormCall | RopeCall | AttentionCall | GateCall


class CpuProgram:
    """See backend.Program. All tensors given to its ops have max_rows rows; a run uses the first ones."""

    def __init__(self, library: Library, num_threads: Callable[[], int], *, dtype: torch.dtype, max_rows: int) -> None:
        """dtype: float32 or bfloat16, of every buffer. Raises BackendUnavailable for others."""
        if dtype not in DTYPE_CODES:
            raise BackendUnavailable(f"the CPU kernels compute in float32 and bfloat16, not {dtype}")
        self.max_rows = max_rows
        self._library = library
        self._num_threads = num_threads
        self._dtype = dtype
        self._calls: list[_Call] = []
        self._alive: list[object] = []
        self._breaks: list[tuple[int, Callable[[int], None]]] = []
        self._frozen: _Frozen | None = None

    def buffer(self, width: int) -> torch.Tensor:
        """Uninitialised [max_rows, width]."""
        check_positive("width", width)
        return torch.empty(self.max_rows, width, dtype=self._dtype)

    def linear(self, linear: LinearFunction, x: torch.Tensor, out: torch.Tensor) -> None:
        """out [R, N] = linear(x [R, K]). Raises BackendUnavailable for a linear that is not the library's own."""
        if not isinstance(linear, RowLinear) or linear.dtype != self._dtype:
            raise BackendUnavailable("a linear is not laid out for the library")
        self._check("x", x, linear.in_features)
        self._check("out", out, linear.out_features, whole=True)
        check_apart("out", out, x=x)
        if linear.out_dtype != self._dtype:
            raise refuse("linear", f"one with results in {linear.out_dtype}", f"one with results in {self._dtype}")
        self._add(linear.call(x, out), linear, x, out)

    def norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        out: torch.Tensor | None,
        weight: torch.Tensor | None,
        *,
        bias: torch.Tensor | None = None,
        epsilon: float = 0.0,
        weight_offset: float = 0.0,
        centred: bool = False,
        x_scale: float = 1.0,
    ) -> None:
        """h = residual + x * x_scale (residual becomes h; None: h = x); out = norm of h, None: only the sum."""
        check_rank("x", x, "[T, N]")
        width = x.shape[1]
        self._check("x", x, width)
        for name, tensor in (("residual", residual), ("out", out)):
            if tensor is not None:
                self._check(name, tensor, width, whole=True)
                check_apart(name, tensor, x=x, residual=None if name == "residual" else residual)
        for name, vector in (("weight", weight), ("bias", bias)):
            if vector is not None:
                check_tensor(name, vector, (width,), self._dtype, _CPU)
        if (out is None) != (weight is None) or (out is None and residual is None):
            raise refuse("out", out, "given together with weight, or left out with a residual to add to")
        self._add(
            NormCall(
                x=x.data_ptr(),
                residual=_address(residual),
                weight=_address(weight),
                bias=_address(bias),
                out=_address(out),
                x_row_stride=x.stride(0),
                width=width,
                centred=int(centred),
                epsilon=epsilon,
                weight_offset=weight_offset,
                x_scale=x_scale,
            ),
            x,
            residual,
            weight,
            bias,
            out,
        )

    def rope_write_kv(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        turned: torch.Tensor,
        *,
        cos_sin: torch.Tensor,
        query_norm: torch.Tensor | None = None,
        key_norm: torch.Tensor | None = None,
        epsilon: float = 0.0,
        norm_offset: float = 0.0,
    ) -> None:
        """CpuBackend.rope_write_kv into turned [R, Hq * D]; query [R, Hq, D], key [R, Hkv, D], value [R, Hkv, Dv]."""
        own = _own(cache)
        anywhere = torch.zeros(self.max_rows, dtype=torch.int64)
        check_rope(query, key, value, own, anywhere, anywhere, cos_sin, query_norm, key_norm)
        self._check("turned", turned, query.shape[1] * query.shape[2], whole=True)
        check_apart("turned", turned, query=query, key=key, value=value)
        write = WriteCall(
            key=key.data_ptr(),
            value=value.data_ptr(),
            kv=own.words.data_ptr(),
            key_row_stride=key.stride(0),
            key_head_stride=key.stride(1),
            value_row_stride=value.stride(0),
            value_head_stride=value.stride(1),
            num_kv_heads=own.shape.num_kv_heads,
            head_dim=own.shape.head_dim,
            v_head_dim=own.shape.v_head_dim,
            num_blocks=own.num_blocks,
            block_size=own.block_size,
        )
        self._add(
            RopeCall(
                write=write,
                query=query.data_ptr(),
                turned=turned.data_ptr(),
                query_norm=_address(query_norm),
                key_norm=_address(key_norm),
                table=cos_sin.data_ptr(),
                query_row_stride=query.stride(0),
                query_head_stride=query.stride(1),
                num_q_heads=query.shape[1],
                rotary_dim=cos_sin.shape[1],
                num_positions=cos_sin.shape[0],
                epsilon=epsilon,
                norm_offset=norm_offset,
            ),
            query,
            key,
            value,
            own,
            turned,
            query_norm,
            key_norm,
            cos_sin,
        )

    def attention(
        self,
        query: torch.Tensor,
        cache: KVCache,
        out: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> None:
        """ops.paged_attention of query [R, Hq, D] into out [R, Hq * Dv]."""
        own = _own(cache)
        check_rank("query", query, "[R, Hq, D]")
        num_q_heads = query.shape[1]
        check_tensor("query", query, (self.max_rows, num_q_heads, own.shape.head_dim), self._dtype, _CPU)
        self._check("out", out, num_q_heads * own.shape.v_head_dim, whole=True)
        check_apart("out", out, query=query)
        if num_q_heads % own.shape.num_kv_heads:
            raise refuse("query", f"{num_q_heads} heads", f"a multiple of {own.shape.num_kv_heads} kv heads")
        window = None if sliding_window is None else min(sliding_window, INT32_MAX)  # no sequence is longer
        check_score_rule(scale, window, softcap)
        self._add(
            AttentionCall(
                query=query.data_ptr(),
                out=out.data_ptr(),
                kv=own.words.data_ptr(),
                query_row_stride=query.stride(0),
                query_head_stride=query.stride(1),
                num_q_heads=num_q_heads,
                num_kv_heads=own.shape.num_kv_heads,
                head_dim=own.shape.head_dim,
                v_head_dim=own.shape.v_head_dim,
                num_blocks=own.num_blocks,
                block_size=own.block_size,
                window=window or 0,
                scale=scale,
                softcap=softcap or 0.0,
            ),
            query,
            own,
            out,
        )

    def activate(self, x: torch.Tensor, out: torch.Tensor, *, activation: str, gated: bool) -> None:
        """out [R, N] = activation(x[:, :N]) * x[:, N:], or activation(x) when not gated; see row_ops.ACTIVATIONS."""
        check_rank("out", out, "[R, N]")
        width = out.shape[1]
        self._check("x", x, width * (2 if gated else 1))
        self._check("out", out, width, whole=True)
        check_apart("out", out, x=x)
        if activation not in ACTIVATIONS:
            raise BackendUnavailable(f"the CPU kernels have no activation {activation}")
        self._add(
            GateCall(
                gate_up=x.data_ptr(),
                out=out.data_ptr(),
                row_stride=x.stride(0),
                width=width,
                activation=ACTIVATIONS[activation],
                gated=int(gated),
            ),
            x,
            out,
        )

    def call(self, function: Callable[[int], None]) -> None:
        """function(rows) at this place: the ops before and after it are two calls of the library."""
        self._breaks.append((len(self._calls), function))
        self._frozen = None

    def run(self, batch: AttentionBatch, positions: torch.Tensor) -> None:
        """Run all ops on the first T rows, T the batch's. positions int64 [T]. Raises KernelArgumentError."""
        check_rank("positions", positions, "[T]")
        num_rows = positions.shape[0]
        if num_rows > self.max_rows:
            raise refuse("batch", f"of {num_rows} rows", f"of {self.max_rows} at most")
        check_tensor("positions", positions, (num_rows,), torch.int64, _CPU)
        check_batch_form(batch, num_rows, _CPU)
        if self._frozen is None:
            self._frozen = _Frozen(self._calls)
        if num_rows:
            self._frozen.set_step(batch, positions, self._num_threads())
            done = 0
            for end, function in self._breaks:
                self._run_ops(self._frozen, done, end)
                function(num_rows)
                done = end
            self._run_ops(self._frozen, done, len(self._calls))

    def _run_ops(self, frozen: "_Frozen", first: int, end: int) -> None:
        if first < end:
            ops = ctypes.cast(ctypes.byref(frozen.ops, first * ctypes.sizeof(Op)), ctypes.POINTER(Op))
            self._library.call("pagefleet_run_program", ops, end - first, DTYPE_CODES[self._dtype])

    def _add(self, call: _Call, *alive: object) -> None:
        self._calls.append(call)
        self._alive.extend(alive)
        self._frozen = None

    def _check(self, name: str, tensor: torch.Tensor, width: int, *, whole: bool = False) -> None:
        check_tensor(name, tensor, (self.max_rows, width), self._dtype, _CPU)
        if whole and not tensor.is_contiguous():
            raise refuse(name, f"strided {tensor.stride()}", "contiguous")


_COMMON: Mapping[type[ctypes.Structure], str] = MappingProxyType({RopeCall: "write", GroupedLinearCall: "linear"})
"""Calls that hold another one, and where."""


class _Frozen:
    """The calls in arrays, one a kind, and the ops that point into them."""

    def __init__(self, calls: list[_Call]) -> None:
        self._arrays = {kind: (kind * sum(type(call) is kind for call in calls))() for kind in OP_KINDS}
        self.ops = (Op * len(calls))()
        used = dict.fromkeys(OP_KINDS, 0)
        for op, call in zip(self.ops, calls, strict=True):
            kind = type(call)
            array, at = self._arrays[kind], used[kind]
            array[at] = call
            op.call, op.kind = ctypes.addressof(array) + at * ctypes.sizeof(kind), OP_KINDS[kind]
            used[kind] += 1
        self._views: Mapping[type[ctypes.Structure], np.ndarray[tuple[int], np.dtype[np.void]]] = {
            kind: np.frombuffer(memoryview(array).cast("B"), dtype=np.dtype(kind))
            for kind, array in self._arrays.items()
            if len(array)
        }

    def set_step(self, batch: AttentionBatch, positions: torch.Tensor, num_threads: int) -> None:
        """Everything that differs between steps; the tensors must live until the run is over."""
        num_rows = positions.shape[0]
        for kind, view in self._views.items():
            common = view[_COMMON[kind]] if kind in _COMMON else view
            rows, threads = common["num_tokens" if kind is RopeCall else "num_rows"], common["num_threads"]
            rows[:] = num_rows
            threads[:] = num_threads
        if RopeCall in self._views:
            rope = self._views[RopeCall]
            rope["positions"] = positions.data_ptr()
            rope["write"]["slots"] = batch.slot_mapping.data_ptr()
        if AttentionCall in self._views:
            attention = self._views[AttentionCall]
            attention["query_starts"] = batch.query_starts.data_ptr()
            attention["seq_lens"] = batch.seq_lens.data_ptr()
            attention["block_tables"] = batch.block_tables.data_ptr()
            attention["table_stride"] = batch.block_tables.stride(0)
            attention["num_seqs"] = batch.seq_lens.shape[0]
            attention["max_blocks"] = batch.block_tables.shape[1]


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _own(cache: KVCache) -> CpuCache:
    if not isinstance(cache, CpuCache):
        raise refuse("cache", f"a {type(cache).__name__}", "one that the CPU backend allocated")
    return cache
