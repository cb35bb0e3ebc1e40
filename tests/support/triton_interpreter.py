"""A process in which Triton interprets kernels on CPU tensors, with exact bf16 and fp8.

TRITON_INTERPRET is read when a kernel is defined, and must not leak into the rest of the suite: so the kernels under
test live in a worker process, and tests send it functions of `support.triton_*work` with plain arguments.

The interpreter itself gets three things wrong silently; `_repair` replaces its private functions for them:
bf16 operands of tl.dot (it multiplies their bit patterns), fp32 -> bf16 (truncates) and fp32 -> fp8 (loses carries).
The canary test holds both the need and the repair.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any, ParamSpec, TypeVar

import numpy as np
import pytest
import torch

from support.poison import poison_new_tensors

P = ParamSpec("P")
R = TypeVar("R")

_KINDS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
_BITS: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.int32}
_STORED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


class Interpreter:
    """Runs functions in the worker process, one at a time."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """function(*args, **kwargs) over there; its exception is raised here."""
        return self._pool.submit(function, *args, **kwargs).result(timeout=280)


@pytest.fixture(scope="module")
def interpreter() -> Interpreter:
    return _shared()


@cache
def _shared() -> Interpreter:
    """One worker for the whole run: it costs seconds to start. It ends with this process."""
    return Interpreter(start())


def start(*, repaired: bool = True) -> ProcessPoolExecutor:
    """The worker; the caller closes it."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=_activate, initargs=(repaired,))


def _activate(repaired: bool) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    poison_new_tensors()
    # A kernel's -inf - -inf or 0 * inf is arithmetic, not a fault; NaN in results is what the tests look for.
    np.seterr(all="ignore")
    if repaired:
        _repair()


def _end_with_parent() -> None:
    """A pool's worker does not notice that its parent was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class _NumpyWithRows:
    """numpy, but for its matrix product."""

    def __init__(self, matmul: Callable[..., Any]) -> None:
        self.matmul = matmul

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def _repair() -> None:
    import triton.language as tl
    import triton.runtime.interpreter as inside

    old_convert: Callable[..., Any] = inside._convert_float
    old_dot: Callable[..., Any] = inside.InterpreterBuilder.create_dot

    def convert(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name not in _KINDS or target.name not in _KINDS:
            return old_convert(x, source, target, rounding)
        x = np.ascontiguousarray(x)
        bits = torch.from_numpy(x.view(_BITS[x.itemsize]).copy())
        exact = bits.view(_KINDS[source.name]).to(_KINDS[target.name])
        return exact.view(_STORED[exact.element_size()]).numpy().reshape(x.shape)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        def up(operand: Any) -> Any:
            return self.cast_impl(operand, tl.float32) if operand.dtype.scalar == tl.bfloat16 else operand

        return old_dot(self, up(a), up(b), d, precision, imprecise)

    def matmul(a: Any, b: Any, dtype: Any = None) -> Any:
        """A row alone, whatever lies beside it: some BLAS sum a row in another order at another place of a tile."""
        if a.ndim != 2 or b.ndim != 2:
            return np.matmul(a, b, dtype=dtype)
        return np.stack([np.matmul(row, b, dtype=dtype) for row in np.ascontiguousarray(a)])

    inside.np = _NumpyWithRows(matmul)
    inside._convert_float = convert
    inside.InterpreterBuilder.create_dot = dot
