"""The shared library: found or built, loaded, its functions typed. Calls release the GIL."""

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path

from pagefleet_kernels.cpu.build import build, cache_dir, find_compiler, source_key
from pagefleet_kernels.cpu.calls import SIGNATURES
from pagefleet_kernels.cpu.isa import INSTRUCTION_SETS, InstructionSet, cpu_flags, supported_sets
from pagefleet_kernels.cpu.weight_memory import WeightMemory
from pagefleet_kernels.errors import BackendUnavailable, KernelArgumentError

LIBRARY_VARIABLE = "PAGEFLEET_KERNELS_CPU_LIBRARY"
"""Environment: path of a prebuilt library, or of a folder with one per instruction set (kernels-<name>.so)."""

_REFUSALS = {
    1: "batch.query_starts must rise from 0 to the number of rows; it does not at sequence {where}",
    2: "batch.seq_lens[{where}] is longer than batch.block_tables can hold",
    3: "batch.block_tables (or pairs) at index {where} names a block outside the cache",
    4: "slot_mapping[{where}] is neither -1 nor a slot of the cache",
    6: "positions[{where}] is outside the rotary table",
}
"""Status -> message; see Status in src/status.h. The last line of defence: ops checks the same with more words."""
_NO_MEMORY = 5


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded library."""

    path: Path
    level: InstructionSet
    functions: ctypes.CDLL
    weights: WeightMemory
    """Where packed weights lie."""

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of calls.SIGNATURES without its last argument; raise what its status means."""
        where = ctypes.c_int32(0)
        status = getattr(self.functions, name)(*arguments, ctypes.byref(where))
        if status == _NO_MEMORY:
            raise MemoryError(f"{name}: no memory for scratch space")
        if status:
            raise KernelArgumentError(_REFUSALS[status].format(where=where.value))

    def advise_huge_pages(self, address: int, num_bytes: int) -> None:
        """Ask for huge pages before the memory is touched; a hint, which the system may ignore."""
        self.functions.pagefleet_advise_huge_pages(address, num_bytes)


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
    """Load a library built for `level` from these sources. Raises BackendUnavailable when that cannot be."""
    try:
        functions = ctypes.CDLL(str(path))
        for name, arguments in SIGNATURES.items():
            function = getattr(functions, name)
            function.restype, function.argtypes = ctypes.c_int32, arguments
        functions.pagefleet_advise_huge_pages.restype = None
        functions.pagefleet_advise_huge_pages.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        functions.pagefleet_source_key.restype = ctypes.c_char_p
        functions.pagefleet_source_key.argtypes = ()
        built_from = functions.pagefleet_source_key().decode()
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(f"cannot load the CPU kernels from {path}: {error}") from error
    if built_from != source_key():
        raise BackendUnavailable(f"{path} was built from other sources than this package's: build it again")
    weights = WeightMemory(functions.pagefleet_advise_huge_pages)
    return Library(path=path, level=level, functions=functions, weights=weights)


def _prebuilt(path: Path, levels: tuple[InstructionSet, ...]) -> Library:
    if path.is_dir():
        for level in levels:
            candidate = path / level.library_name
            if candidate.exists():
                return load(candidate, level)
        names = ", ".join(level.library_name for level in levels)
        raise BackendUnavailable(f"{LIBRARY_VARIABLE}={path} holds none of {names}")
    for level in levels:
        if level.name in path.name:
            return load(path, level)
    names = " or ".join(level.name for level in levels)
    raise BackendUnavailable(f"{LIBRARY_VARIABLE}={path}: the file's name must say its instruction set ({names})")
