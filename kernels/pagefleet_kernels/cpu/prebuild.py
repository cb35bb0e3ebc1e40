"""Building the library of every level ahead of time, for images: python -m pagefleet_kernels.cpu.prebuild --output DIR.

A server with PAGEFLEET_KERNELS_CPU_LIBRARY=DIR then takes the best level that its CPU has, and needs no compiler.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pagefleet_kernels.cpu.build import compile_to, find_compiler
from pagefleet_kernels.cpu.isa import INSTRUCTION_SETS
from pagefleet_kernels.errors import BackendUnavailable


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every level was built."""
    parser = argparse.ArgumentParser(prog="pagefleet_kernels.cpu.prebuild", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the libraries, made if absent")
    output: Path = parser.parse_args(argv).output
    output.mkdir(parents=True, exist_ok=True)
    try:
        compiler = find_compiler()
        for level in INSTRUCTION_SETS:
            target = output / level.library_name
            compile_to(target, level, compiler)
            print(f"{target} ({compiler.version})")
    except BackendUnavailable as error:
        print(error.reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
