"""Building the library at first use, once per source, instruction set and compiler, whoever else wants it too."""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pagefleet_kernels.cpu.isa import InstructionSet
from pagefleet_kernels.errors import BackendUnavailable

_logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "src"
MAIN_SOURCE = "api.cpp"
BUILD_TIMEOUT_SECONDS = 300.0
MAX_MESSAGE_CHARS = 600

# No contraction and no fast-math: one lane's arithmetic is what the source says, on every compiler.
BASE_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fvisibility=hidden")
SANITIZER_FLAGS = (
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
)


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler and what it says of itself."""

    path: str
    version: str
    """First line of --version: part of the cache key."""


def find_compiler(environment: dict[str, str] | None = None) -> Compiler:
    """$CXX, else g++, else clang++. Raises BackendUnavailable when none can be run."""
    env = dict(os.environ) if environment is None else environment
    candidates = [env["CXX"]] if env.get("CXX") else ["g++", "clang++"]
    for candidate in candidates:
        path = shutil.which(candidate, path=env.get("PATH"))
        if path is None:
            continue
        try:
            shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return Compiler(path=path, version=shown.stdout.split("\n", 1)[0])
    raise BackendUnavailable(
        f"no C++ compiler ({', '.join(candidates)}) to build the CPU kernels: install one, or point "
        "PAGEFLEET_KERNELS_CPU_LIBRARY at a prebuilt library"
    )


def cache_dir(environment: dict[str, str] | None = None) -> Path:
    """Where built libraries live: $PAGEFLEET_CACHE_DIR, else $XDG_CACHE_HOME/pagefleet, else ~/.cache/pagefleet."""
    env = dict(os.environ) if environment is None else environment
    if env.get("PAGEFLEET_CACHE_DIR"):
        return Path(env["PAGEFLEET_CACHE_DIR"])
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]) / "pagefleet"
    home = env.get("HOME")
    if not home or not os.access(home, os.W_OK):
        # A container's user without a home: private to the user, gone with the container.
        return Path(tempfile.gettempdir()) / f"pagefleet-{os.getuid()}"
    return Path(home) / ".cache" / "pagefleet"


def source_files() -> list[Path]:
    """The library's sources, headers included, in a fixed order."""
    return sorted(path for path in SOURCE_DIR.iterdir() if path.suffix in (".cpp", ".h"))


def source_key() -> str:
    """Hash of the sources; a library says which it was built from."""
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def library_key(level: InstructionSet, compiler: Compiler, flags: tuple[str, ...]) -> str:
    """Hash of everything that decides the built bytes."""
    parts = (source_key(), level.name, compiler.path, compiler.version, *level.compiler_flags, *flags)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def build(level: InstructionSet, compiler: Compiler, directory: Path, *, sanitize: bool = False) -> Path:
    """The library's path, built unless it is there already. Safe to call from many processes at once.

    A crash leaves a temporary file at most, which the next build takes away: the library appears by rename. Raises
    BackendUnavailable.
    """
    flags = (*BASE_FLAGS, *(SANITIZER_FLAGS if sanitize else ()))
    name = f"kernels-{level.name}{'-sanitized' if sanitize else ''}-{library_key(level, compiler, flags)}.so"
    target = directory / name
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_foreign(directory)
        if target.exists():
            return target
        with _locked(directory / "build.lock"):
            if not target.exists():
                for unfinished in directory.glob("kernels-*.tmp"):  # Of builds that were killed: this one has the lock.
                    unfinished.unlink(missing_ok=True)
                compile_to(target, level, compiler, flags)
    except OSError as error:
        raise BackendUnavailable(f"cannot build the CPU kernels in {directory}: {error}") from error
    return target


def _refuse_foreign(directory: Path) -> None:
    """Code is loaded from here: nobody else may own it or write to it."""
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise BackendUnavailable(
            f"{directory} must belong to this user and be writable by nobody else (chmod go-w, or set "
            "PAGEFLEET_CACHE_DIR)"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclusive among processes; the kernel releases it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_to(target: Path, level: InstructionSet, compiler: Compiler, flags: tuple[str, ...] = BASE_FLAGS) -> None:
    """Build the library at `target`, which appears by rename. Raises BackendUnavailable."""
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    key = source_key()
    define = f'-DPAGEFLEET_SOURCE_KEY="{key}"'
    source = str(SOURCE_DIR / MAIN_SOURCE)
    command = [compiler.path, *flags, *level.compiler_flags, define, source, "-o", str(partial)]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_SECONDS, check=False)
        if done.returncode != 0:
            raise BackendUnavailable(
                f"building the CPU kernels failed ({compiler.version}): {done.stderr[:MAX_MESSAGE_CHARS].strip()}"
            )
        if source_key() != key:
            raise BackendUnavailable("the CPU kernels' sources changed while they were built: start again")
        partial.replace(target)
        _logger.info("built %s with %s in %.1f s", target, compiler.version, time.monotonic() - started)
    except subprocess.TimeoutExpired as error:
        raise BackendUnavailable(f"building the CPU kernels took over {BUILD_TIMEOUT_SECONDS:.0f} s") from error
    finally:
        partial.unlink(missing_ok=True)
