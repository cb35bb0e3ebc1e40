"""The engine as a child process: start, wait with a bound, end."""

import asyncio
from collections.abc import Sequence
from typing import Self


class EngineProcess:
    """Never leaves a process behind after stop(). stderr and stdout are inherited: one log per pod."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def spawn(cls, command: Sequence[str], *, inherit_fd: int) -> Self:
        """Start it with one extra descriptor, under the same number, and no stdin."""
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, pass_fds=(inherit_fd,)
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
