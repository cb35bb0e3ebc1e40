"""Every configuration that ships, compiled for GPUs that are not here, as rows of a table.

python -m support.triton_matrix OUT.json        (with another triton first on PYTHONPATH to check that one)
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from pagefleet_kernels.triton.cache import FP8
from pagefleet_kernels.triton.launch import ADA, AMPERE, BLACKWELL, HOPPER, Device, Launch
from support import triton_plans as plans
from support.triton_compile import Compiled, compile_launch

DEVICES = {80: AMPERE, 89: ADA, 90: HOPPER, 100: BLACKWELL}
WIDTHS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
EVERYTHING: dict[str, Any] = {"window": 1024, "softcap": 30.0, "sinks": True}


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel for one device."""

    name: str
    device: Device
    launch: Launch
    tensor_cores: bool
    """Products of tiles must be on the device's own matrix instructions."""
    spill_bytes_allowed: int = 0
    """Stack that it may use."""


@dataclass(frozen=True, slots=True)
class Row:
    """What became of an entry."""

    name: str
    capability: int
    registers: int
    stack_bytes: int
    spill_accesses: int
    shared_bytes: int
    matrix_instructions: int
    wide_loads: int
    """Global loads of 128 bits, asynchronous ones included."""


def attention(capability: int, kind: str, dtype: torch.dtype, widths: tuple[int, int], **features: Any) -> Entry:
    """kind: decode or prefill."""
    device = DEVICES[capability]
    made = plans.operands(head_dim=widths[0], v_head_dim=widths[1], dtype=dtype, **features)
    launch = plans.decode(device, made) if kind == "decode" else plans.prefill(device, made)
    shown = "".join(f" {name}" if name in EVERYTHING else f" {name}={value}" for name, value in features.items())
    # The one exception: where widened fp8 takes registers that wgmma holds, what Triton 3.9 fits, 3.6 spills.
    hard = capability == 90 and kind == "prefill" and dtype == FP8 and min(widths) > 128
    old = triton.__version__.startswith("3.6.")
    name = f"{kind} {str(dtype)[6:]} {widths[0]}/{widths[1]}{shown}"
    return Entry(name, device, launch, dtype != torch.float32, spill_bytes_allowed=112 if hard and old else 0)


def everything() -> Iterator[Entry]:
    """All of it: minutes."""
    for capability, device in DEVICES.items():
        for dtype in (torch.bfloat16, FP8) if capability >= 89 else (torch.bfloat16,):
            for widths in WIDTHS:
                # The features cost registers: where they fit, leaving them out does.
                for kind in ("decode", "prefill"):
                    yield attention(capability, kind, dtype, widths, **EVERYTHING)
            for kind in ("decode", "prefill"):
                yield attention(capability, kind, dtype, (128, 128))
        yield from neighbours(device, fp8=capability >= 89)
    for kind in ("decode", "prefill"):
        for dtype in (torch.float16, torch.float32):
            yield attention(90, kind, dtype, (128, 128))
        for block_size in (32, 256):
            yield attention(90, kind, torch.bfloat16, (128, 128), block_size=block_size)
        for group in (1, 7, 71):
            yield attention(90, kind, torch.bfloat16, (128, 128), group=group)


def neighbours(device: Device, *, fp8: bool) -> Iterator[Entry]:
    """Everything that is not attention itself."""
    made = plans.operands()
    launches = {"combine": plans.combine(device, made), "write": plans.write(made), "rope": plans.rope_write(made)}
    launches["rope, interleaved, partial"] = plans.rope_write(made, rotary=64, interleaved=True)
    launches["rope, norms"] = plans.rope_write(made, norms=True)
    if fp8:
        launches["rope to fp8"] = plans.rope_write(plans.operands(dtype=FP8))
    launches |= plans.pointwise() | plans.sampler()
    launches["copy"] = plans.copy(made)
    for name, launch in launches.items():
        yield Entry(name, device, launch, tensor_cores=False)


def build(entry: Entry) -> Row:
    """Compile it."""
    capability = entry.device.capability
    compiled = compile_launch(entry.launch, capability)
    return Row(
        name=entry.name,
        capability=capability,
        registers=compiled.registers,
        stack_bytes=compiled.stack_bytes,
        spill_accesses=compiled.local_accesses,
        shared_bytes=compiled.shared_bytes,
        matrix_instructions=_matrix_instructions(entry, compiled),
        wide_loads=compiled.count("LDG", "128"),
    )


def faults(entry: Entry, row: Row) -> list[str]:
    """What is wrong with it; empty when it may ship."""
    found = []
    if row.stack_bytes > entry.spill_bytes_allowed or (row.spill_accesses and not entry.spill_bytes_allowed):
        found.append(f"spills: {row.stack_bytes} bytes of stack, {row.spill_accesses} accesses")
    if row.shared_bytes > entry.device.shared_bytes:
        found.append(f"{row.shared_bytes} bytes of shared memory, the device has {entry.device.shared_bytes}")
    if entry.tensor_cores and not row.matrix_instructions:
        found.append("its products are not on the matrix units")
    if entry.tensor_cores and row.wide_loads < 4:
        found.append(f"only {row.wide_loads} loads of 128 bits")
    return found


def _matrix_instructions(entry: Entry, compiled: Compiled) -> int:
    """Decode tiles of 16 rows use mma.sync everywhere; prefill tiles use what each generation is fast with."""
    if not entry.name.startswith("prefill") or entry.device.capability < 90:
        return compiled.count("HMMA") + compiled.count("HGMMA")
    return compiled.count("HGMMA") if entry.device.capability == 90 else compiled.count("UTC", "MMA")


def main(path: str) -> None:
    """Write {time, commit, triton, faults, rows} to path."""
    rows, wrong = [], {}
    for entry in everything():
        row = build(entry)
        rows.append(asdict(row))
        if found := faults(entry, row):
            wrong[f"{entry.name} sm_{row.capability}"] = found
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    table = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or "unknown",
        "triton": triton.__version__,
        "faults": wrong,
        "rows": rows,
    }
    Path(path).write_text(json.dumps(table, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
