"""Instruction sets that the library is built for, and which of them a CPU has."""

import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One fixed level. Never the build machine's own: a cache or an image may move to another CPU."""

    name: str
    cpu_flags: frozenset[str]
    """Flags, as the kernel names them, that a CPU needs to run it."""
    compiler_flags: tuple[str, ...]

    @property
    def library_name(self) -> str:
        """File name of a prebuilt library of this level."""
        return f"kernels-{self.name}.so"


AVX512_BF16 = InstructionSet(
    name="avx512bf16",
    cpu_flags=frozenset({"avx2", "fma", "popcnt", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}),
    compiler_flags=(
        "-mavx2",
        "-mfma",
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mavx512bf16",
        "-mpopcnt",
    ),
)
AVX2 = InstructionSet(
    name="avx2",
    cpu_flags=frozenset({"avx2", "fma", "f16c", "popcnt"}),
    compiler_flags=("-mavx2", "-mfma", "-mf16c", "-mpopcnt"),
)
INSTRUCTION_SETS = (AVX512_BF16, AVX2)
"""Best first."""


def supported_sets(flags: Collection[str]) -> tuple[InstructionSet, ...]:
    """The levels that a CPU with these flags can run, best first."""
    return tuple(level for level in INSTRUCTION_SETS if level.cpu_flags <= frozenset(flags))


def cpu_flags(cpu_info: Path = CPU_INFO) -> frozenset[str]:
    """Flags of this machine's CPU; empty where it is no x86-64 Linux, which then supports no level."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        text = cpu_info.read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
