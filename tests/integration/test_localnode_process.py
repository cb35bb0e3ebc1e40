"""A container's process: exit codes, its whole group's end, and what happens when the node dies."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from pagefleet_localcluster.node.process import Command, Process, end_stale
from support.local_cluster import eventually

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


def shell(script: str, folder: Path, **environment: str) -> Command:
    return Command("/bin/sh", ["sh", "-c", script], {**ENVIRONMENT, **environment}, folder)


async def run(command: Command, log: Path, *, pid_file: Path | None = None) -> Process:
    with log.open("ab") as output:
        return Process(command, output=output.fileno(), pid_file=pid_file)


def is_alive(pid: int) -> bool:
    try:
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("case", "script", "want"),
    [
        ("success", "exit 0", 0),
        ("failure", "exit 7", 7),
        ("a signal counts as 128 and its number", "kill -TERM $$", 143),
        ("SIGPIPE is not ignored", "kill -PIPE $$", 141),
    ],
)
async def test_exit_codes(case: str, script: str, want: int, tmp_path: Path) -> None:
    process = await run(shell(script, tmp_path), tmp_path / "log")
    assert await process.wait() == want, case


async def test_a_program_that_cannot_be_executed_says_so_in_its_log(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    process = await run(Command(str(broken), ["broken"], ENVIRONMENT, tmp_path), tmp_path / "log")
    assert await process.wait() == 126
    assert (tmp_path / "log").read_text() == f"exec {broken}: Exec format error\n"


async def test_children_end_with_their_leader(tmp_path: Path) -> None:
    process = await run(shell("sleep 100 & echo $!; exit 3", tmp_path), tmp_path / "log", pid_file=tmp_path / "c.pid")
    assert (tmp_path / "c.pid").read_text() == f"{process.pid}\n"
    assert await process.wait() == 3
    child = int((tmp_path / "log").read_text())

    async def gone() -> bool:
        return not is_alive(child)

    await eventually(gone)
    assert not (tmp_path / "c.pid").exists()


async def test_a_signal_reaches_the_whole_group(tmp_path: Path) -> None:
    script = "trap 'echo parent; exit 0' TERM; (trap 'echo child; exit 0' TERM; sleep 100 & wait) & echo up; wait; wait"
    process = await run(shell(script, tmp_path), tmp_path / "log")

    async def up() -> bool:
        return "up" in (tmp_path / "log").read_text()

    await eventually(up)
    process.signal(signal.SIGTERM)
    await process.wait()
    assert "parent" in (tmp_path / "log").read_text()


NODE = """
import asyncio, sys
from pathlib import Path
from pagefleet_localcluster.node.process import Command, Process
folder = Path(sys.argv[1])
environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder)}
async def main():
    script = "sleep 100 & echo $! >child; echo $$ >leader; wait"
    Process(Command("/bin/sh", ["sh", "-c", script], environment, folder), output=1, pid_file=folder / "c.pid")
    await asyncio.sleep(100)
asyncio.run(main())
"""


async def test_a_killed_node_takes_its_processes_with_it_and_the_next_one_ends_the_rest(tmp_path: Path) -> None:
    """The kernel kills the leader; a child that outlives it is found by its session and environment."""
    node = await asyncio.create_subprocess_exec(sys.executable, "-c", NODE, str(tmp_path))
    try:

        async def pids() -> tuple[int, int] | None:
            leader, child = ((tmp_path / name).read_text() for name in ("leader", "child"))
            return (int(leader), int(child)) if leader and child else None

        leader, child = await eventually(pids)
    finally:
        node.kill()
        await node.wait()

    async def leader_gone() -> bool:
        return not is_alive(leader)

    await eventually(leader_gone)
    stranger = await run(shell("sleep 100", tmp_path), tmp_path / "log")
    (tmp_path / "reused.pid").write_text(f"{stranger.pid}\n")
    assert end_stale(tmp_path) == [child]
    assert is_alive(stranger.pid), "a process whose environment does not name the folder is not ours"
    assert end_stale(tmp_path) == []
    stranger.signal(signal.SIGKILL)
    assert await stranger.wait() == 137
