"""The engine as a child process: start, wait with a bound, end."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Self

OPENMP_SPINS = 2000
"""Turns that torch's OpenMP threads wait awake for their next piece of work: microseconds. By default they spin for
milliseconds, on the core that the kernels' own threads need by then; asleep at once, every piece would wake them up."""


def engine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment: this process's, and OPENMP_SPINS unless how OpenMP waits is said there."""
    if "GOMP_SPINCOUNT" in environ or "OMP_WAIT_POLICY" in environ:
        return dict(environ)
    return {**environ, "GOMP_SPINCOUNT": str(OPENMP_SPINS)}


class EngineProcess:
    """Never leaves a process behind after stop(). stderr and stdout are inherited: one log per pod."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def spawn(cls, command: Sequence[str], *, inherit_fd: int) -> Self:
        """Start it with one extra descriptor, under the same number, and no stdin."""
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, pass_fds=(inherit_fd,), env=engine_environment(os.environ)
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        if self._process.returncode is None:
            self._process.kill()

    async def wait(self, timeout_seconds: float) -> int | None:
        """Exit code (negative: signal), or None when it still runs after the timeout."""
        try:
            return await asyncio.wait_for(self._process.wait(), timeout_seconds)
        except TimeoutError:
            return None

    async def stop(self, timeout_seconds: float) -> int:
        """Wait for it to end by itself, then kill it."""
        return_code = await self.wait(timeout_seconds)
        if return_code is None:
            self.kill()
            return_code = await self._process.wait()
        return return_code
