"""The demo's child processes: each in its own session with its own log, all ended in reverse order."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

BIN = Path(sys.executable).parent
STOP_SECONDS = 90.0
LOG_TAIL_LINES = 40


class Processes:
    """Starts long-running children and runs short commands with the demo's environment."""

    def __init__(self, folder: Path, *, env: dict[str, str]) -> None:
        self._folder = folder
        self._env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}", **env}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> None:
        """Start a long-running child; its output goes to NAME.log in the demo's folder."""
        with (self._folder / f"{name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raise RuntimeError when a child has ended."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with exit code {process.returncode}")

    async def kubectl(self, *arguments: str) -> str:
        """Standard output of one kubectl command; RuntimeError with its error output when it fails."""
        process = await asyncio.create_subprocess_exec(
            str(BIN / "kubectl"),
            *arguments,
            env=self._env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            output, errors = await process.communicate()
        finally:
            await _end(process)
        if process.returncode != 0:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {errors.decode().strip()}")
        return output.decode()

    async def succeed(self, *command: str, within_seconds: float) -> None:
        """Repeat a kubectl command until it succeeds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_seconds
        while True:
            self.check()
            try:
                await self.kubectl(*command[1:])
                return
            except RuntimeError:
                if loop.time() > deadline:
                    raise
            await asyncio.sleep(0.2)

    async def lines(self, *command: str) -> AsyncIterator[str]:
        """Lines of a command that runs until it is cancelled."""
        process = await asyncio.create_subprocess_exec(
            str(BIN / command[0]),
            *command[1:],
            env=self._env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdout is not None  # asked for above
        try:
            async for line in process.stdout:
                if text := line.decode().rstrip():
                    yield text
        finally:
            await _end(process)

    def print_logs(self) -> None:
        """The end of each child's log, for a failed run."""
        for path in sorted(self._folder.glob("**/*.log")):
            print(f"--- {path.relative_to(self._folder)} (last {LOG_TAIL_LINES} lines)")
            print("\n".join(path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]), flush=True)

    async def stop(self) -> None:
        """SIGTERM in reverse order of start, SIGKILL for what does not end in time."""
        for process in reversed(self._running.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    await asyncio.to_thread(process.wait, STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    await asyncio.to_thread(process.wait)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()
