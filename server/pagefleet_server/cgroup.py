"""The limits of this process's control group, of both versions, and of all groups around it."""

from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
NO_LIMIT = 1 << 60
"""Version 1 writes a number near 2**63 where nothing is limited."""


def memory_limit(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes; None: no limit is set, or the system does not say."""
    found = [
        int(text)
        for version_2, version_1 in _folders("memory", mount, membership)
        for text in (_read(version_2 / "memory.max"), _read(version_1 / "memory.limit_in_bytes"))
        if text.isdigit() and int(text) < NO_LIMIT
    ]
    return min(found, default=None)


def cpu_limit(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float | None:
    """CPUs' worth of time; None: no limit is set, or the system does not say."""
    found = []
    for version_2, version_1 in _folders("cpu", mount, membership):
        quotas = (
            _read(version_2 / "cpu.max").split(),
            [_read(version_1 / "cpu.cfs_quota_us"), _read(version_1 / "cpu.cfs_period_us")],
        )
        for quota in quotas:
            if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]) > 0:
                found.append(int(quota[0]) / int(quota[1]))
    return min(found, default=None)


def _folders(controller: str, mount: Path, membership: Path) -> Iterator[tuple[Path, Path]]:
    """(folder of version 2, folder of version 1) of the own group and of each around it. A container may see its own
    group as the root, whatever its membership says: the root is always among them."""
    paths = {"0": "/", "1": "/"}
    for line in _read(membership).splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            paths["0"] = path
        elif controller in names.split(","):
            paths["1"] = path
    below = [[Path(path.lstrip("/")), *Path(path.lstrip("/")).parents] for path in paths.values()]
    for index in range(max(map(len, below))):
        at = [levels[min(index, len(levels) - 1)] for levels in below]
        yield mount / at[0], mount / controller / at[1]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
