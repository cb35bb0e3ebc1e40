"""Compile planned launches for GPUs that are not here, and read what came out.

A Launch is specialised as Triton's launcher would do it: None and 1 become constants, aligned pointers and multiples of
16 carry the hint that makes loads 128 bits wide. Needs the real compiler: TRITON_INTERPRET must not be set.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagefleet_kernels.triton.launch import Launch

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the assembler says of one kernel."""

    registers: int
    stack_bytes: int
    local_accesses: int
    """Loads and stores of spilled registers."""
    shared_bytes: int
    """Dynamic shared memory of one program."""
    opcodes: Counter[str]
    """Occurrences of SASS opcodes, modifiers included."""

    def count(self, *needles: str) -> int:
        """Instructions whose opcode holds every needle."""
        return sum(n for opcode, n in self.opcodes.items() if all(needle in opcode for needle in needles))


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """Compile for sm_<capability>; device code only, no driver needed."""
    names = list(launch.kernel.arg_names)
    loose = {parameter.name for parameter in launch.kernel.params if parameter.do_not_specialize}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(launch.constants)
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        value = launch.arguments[name]
        if value is None or (isinstance(value, int) and value == 1 and name not in loose):
            signature[name] = "constexpr"
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            offset = value.storage_offset() * value.element_size()
            if offset % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and name not in loose:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    keyed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=keyed, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = _cuobjdump("-res-usage", file.name)
        sass = _cuobjdump("-sass", file.name)
    opcodes = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", sass, re.MULTILINE))
    registers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if registers is None or not opcodes:
        raise ValueError(f"cuobjdump printed no resource usage or code: {usage[:500]}")
    return Compiled(
        registers=int(registers[1]),
        stack_bytes=int(registers[2]),
        local_accesses=sum(n for opcode, n in opcodes.items() if opcode.startswith(("LDL", "STL"))),
        shared_bytes=int(built.metadata.shared),
        opcodes=opcodes,
    )


def _cuobjdump(option: str, path: str) -> str:
    done = subprocess.run(
        [str(_TOOLS / "cuobjdump"), option, path], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise RuntimeError(f"cuobjdump {option}: {done.stderr[-500:]}")
    return done.stdout + done.stderr
