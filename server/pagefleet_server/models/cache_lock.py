"""One writer at a time in a folder that several machines may share: a lock file that its owner keeps touching.

A lock is stale when nobody touched it while we watched for `stale_seconds` of our own monotonic clock (clocks of two
machines are never compared), or when its owner is a process of this host that is gone. Two writers for a moment do no
harm: both write the same bytes, and what is published has been hashed.
"""

import contextlib
import json
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

STALE_SECONDS = 60.0
BEAT_SECONDS = 5.0
"""A lock is touched this often."""
MAX_LOCK_BYTES = 4096


class CacheLock:
    """The lock file `path`. All methods are short file operations; they raise OSError when the disk does."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float],
        stale_seconds: float = STALE_SECONDS,
        host: str | None = None,
        pid: int | None = None,
    ) -> None:
        """`host` and `pid` say who we are; None: this process."""
        self._path = path
        self._clock = clock
        self._stale_seconds = stale_seconds
        self._host = host or socket.gethostname()
        self._pid = pid or os.getpid()
        self._token = uuid.uuid4().hex
        self._seen: tuple[object, float] | None = None
        """What another one's lock looked like, and since when."""

    def try_acquire(self) -> bool:
        """Whether the lock is ours now."""
        if self._create(self._content()):
            return True
        try:
            owner, touched = self._read(self._path), self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return self._create(self._content())
        now = self._clock()
        if self._seen is None or self._seen[0] != (owner, touched):
            self._seen = ((owner, touched), now)
        if self._is_gone(owner) or now - self._seen[1] >= self._stale_seconds:
            return self._break(owner) and self._create(self._content())
        return False

    def beat(self) -> bool:
        """Say that we are alive; False when the lock is no longer ours."""
        try:
            if self._read(self._path).get("token") != self._token:
                return False
            os.utime(self._path)
        except FileNotFoundError:
            return False
        return True

    def release(self) -> None:
        """Give it up if it is ours."""
        with contextlib.suppress(FileNotFoundError):
            if self._read(self._path).get("token") == self._token:
                self._path.unlink()

    def _content(self) -> str:
        return json.dumps({"token": self._token, "host": self._host, "pid": self._pid})

    def _create(self, content: str) -> bool:
        try:
            with self._path.open("x") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True

    def _break(self, stale: Mapping[str, Any]) -> bool:
        """Take the stale lock away. False when it was someone's fresh one: then it is put back."""
        aside = self._path.with_name(f"{self._path.name}.{self._token}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return True
        try:
            moved = self._read(aside)
            if moved == stale:
                return True
            self._create(json.dumps(moved))
            return False
        finally:
            aside.unlink(missing_ok=True)

    @staticmethod
    def _read(path: Path) -> dict[str, Any]:
        """Who holds it; {} while its owner is still writing it. Raises FileNotFoundError."""
        with path.open(errors="replace") as file:
            text = file.read(MAX_LOCK_BYTES)
        try:
            found = json.loads(text)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _is_gone(self, owner: Mapping[str, Any]) -> bool:
        """Whether it was a process of this host that ended: a server that is started again need not wait."""
        pid = owner.get("pid")
        if owner.get("host") != self._host or not isinstance(pid, int) or not 0 < pid < 2**31:
            return False
        if pid == self._pid:
            return True  # our predecessor in a container that was started again: a process has one lock
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False
