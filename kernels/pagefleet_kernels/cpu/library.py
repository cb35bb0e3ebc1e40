"""The shared library: found or built, loaded, its functions typed. Calls release the GIL."""

import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from pagefleet_kernels.cpu.build import build, cache_dir, find_compiler
from pagefleet_kernels.cpu.isa import INSTRUCTION_SETS, InstructionSet, cpu_flags, supported_sets
from pagefleet_kernels.errors import BackendUnavailable, KernelArgumentError

LIBRARY_VARIABLE = "PAGEFLEET_KERNELS_CPU_LIBRARY"
"""Environment: path of a prebuilt library, or of a folder with one per instruction set (kernels-<name>.so)."""

_P, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class AttentionCall(ctypes.Structure):
    """src/attention.h, field by field."""

    _fields_ = (
        ("query", _P),
        ("out", _P),
        ("kv", _P),
        ("query_starts", _P),
        ("seq_lens", _P),
        ("block_tables", _P),
        ("sinks", _P),
        ("query_row_stride", _I64),
        ("query_head_stride", _I64),
        ("table_stride", _I64),
        ("num_rows", _I32),
        ("num_seqs", _I32),
        ("num_q_heads", _I32),
        ("num_kv_heads", _I32),
        ("head_dim", _I32),
        ("v_head_dim", _I32),
        ("num_blocks", _I32),
        ("block_size", _I32),
        ("max_blocks", _I32),
        ("window", _I32),
        ("num_threads", _I32),
        ("scale", _F32),
        ("softcap", _F32),
    )


class WriteCall(ctypes.Structure):
    """src/kv_write.h, field by field."""

    _fields_ = (
        ("key", _P),
        ("value", _P),
        ("kv", _P),
        ("slots", _P),
        ("key_row_stride", _I64),
        ("key_head_stride", _I64),
        ("value_row_stride", _I64),
        ("value_head_stride", _I64),
        ("num_tokens", _I32),
        ("num_kv_heads", _I32),
        ("head_dim", _I32),
        ("v_head_dim", _I32),
        ("num_blocks", _I32),
        ("block_size", _I32),
        ("num_threads", _I32),
    )


class LinearCall(ctypes.Structure):
    """src/linear.h, field by field."""

    _fields_ = (
        ("x", _P),
        ("out", _P),
        ("weight", _P),
        ("bias", _P),
        ("x_row_stride", _I64),
        ("num_rows", _I32),
        ("in_features", _I32),
        ("out_features", _I32),
        ("num_threads", _I32),
    )


DTYPE_CODES: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 0, torch.bfloat16: 1})
"""What the library computes on -> its `dtype` argument."""

_REFUSALS = {
    1: "batch.query_starts must rise from 0 to the number of rows; it does not at sequence {where}",
    2: "batch.seq_lens[{where}] is longer than batch.block_tables can hold",
    3: "batch.block_tables (or pairs) at index {where} names a block outside the cache",
    4: "slot_mapping[{where}] is neither -1 nor a slot of the cache",
}
"""Status -> message; see Status in src/attention.h. The last line of defence: ops checks the same with more words."""
_NO_MEMORY = 5


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded library."""

    path: Path
    level: InstructionSet
    functions: ctypes.CDLL

    def call(self, name: str, *arguments: object) -> None:
        """Call a function whose last argument says where it stopped; raise what its status means."""
        where = _I32(0)
        status = getattr(self.functions, name)(*arguments, ctypes.byref(where))
        if status == _NO_MEMORY:
            raise MemoryError(f"{name}: no memory for scratch space")
        if status:
            raise KernelArgumentError(_REFUSALS[status].format(where=where.value))


@functools.cache
def find_library() -> Library:
    """The best library for this CPU: prebuilt where LIBRARY_VARIABLE names one, else built at first use.

    Raises BackendUnavailable with the reason.
    """
    levels = supported_sets(cpu_flags())
    if not levels:
        needed = " or ".join(level.name for level in INSTRUCTION_SETS)
        raise BackendUnavailable(f"this CPU has none of the instruction sets that the CPU kernels need ({needed})")
    prebuilt = os.environ.get(LIBRARY_VARIABLE)
    if prebuilt:
        return _prebuilt(Path(prebuilt), levels)
    return load(build(levels[0], find_compiler(), cache_dir()), levels[0])


def load(path: Path, level: InstructionSet) -> Library:
    """Load a library built for `level`. Raises BackendUnavailable when it cannot be loaded."""
    try:
        functions = ctypes.CDLL(str(path))
        _declare(functions)
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(f"cannot load the CPU kernels from {path}: {error}") from error
    return Library(path=path, level=level, functions=functions)


def _prebuilt(path: Path, levels: tuple[InstructionSet, ...]) -> Library:
    if path.is_dir():
        for level in levels:
            candidate = path / f"kernels-{level.name}.so"
            if candidate.exists():
                return load(candidate, level)
        names = ", ".join(f"kernels-{level.name}.so" for level in levels)
        raise BackendUnavailable(f"{LIBRARY_VARIABLE}={path} holds none of {names}")
    for level in levels:
        if level.name in path.name:
            return load(path, level)
    names = " or ".join(level.name for level in levels)
    raise BackendUnavailable(f"{LIBRARY_VARIABLE}={path}: the file's name must say its instruction set ({names})")


def _declare(functions: ctypes.CDLL) -> None:
    where = ctypes.POINTER(_I32)
    signatures: dict[str, tuple[type[ctypes._SimpleCData[int]] | None, tuple[Callable[..., object] | type, ...]]] = {
        "pagefleet_attention": (_I32, (ctypes.POINTER(AttentionCall), _I32, where)),
        "pagefleet_write_kv": (_I32, (ctypes.POINTER(WriteCall), _I32, where)),
        "pagefleet_copy_blocks": (_I32, (_P, _P, _I64, _I64, _I64, where)),
        "pagefleet_linear": (None, (ctypes.POINTER(LinearCall), _I32)),
        "pagefleet_pack_linear": (None, (_P, _I64, _I32, _I32, _P, _I32, _I32)),
        "pagefleet_advise_huge_pages": (None, (_P, _I64)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(functions, name)
        function.restype = result
        function.argtypes = arguments
