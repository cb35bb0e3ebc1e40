"""Objects on disk: every change as one JSON line, rewritten as a snapshot when the file has grown.

A line reaches the operating system before its answer reaches the client: objects survive the end of the process, not
a power cut."""

import fcntl
import json
import os
from io import BufferedWriter
from pathlib import Path
from typing import Any

from pagefleet_localcluster.api.store import Change, Collection, Name, Store

Json = dict[str, Any]
_MIN_COMPACT_BYTES = 8 * 2**20
_FILE = "objects.jsonl"


class JournalError(Exception):
    """The data directory cannot be used: locked by another server, or damaged."""


class Journal:
    """Keeps one store in one directory. Open it before the store serves anybody, close it last."""

    def __init__(self, directory: Path, store: Store) -> None:
        self._path = directory / _FILE
        self._store = store
        self._file: BufferedWriter | None = None
        self._lock_fd: int | None = None
        self._bytes = 0
        self._compact_at = _MIN_COMPACT_BYTES

    def open(self) -> None:
        """Puts back what the directory holds, then records every change. Raises JournalError, OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock_fd = os.open(self._path.parent / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise JournalError(f"{self._path.parent} is in use by another API server: end that one first") from error
        if self._path.exists():
            self._load()
        self._compact()
        self._store.listen(self._record)

    def _load(self) -> None:
        objects: dict[tuple[Collection, Name], Json] = {}
        version = 0
        lines = self._path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                entry = json.loads(line)
                key = (tuple(entry["c"]), tuple(entry["n"]))
                version = max(version, entry["v"])
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines):  # cut off when the process ended
                    break
                text = f"{self._path}, line {number}, is damaged: {str(error)[:100]}; move the file away to start empty"
                raise JournalError(text) from error
            if entry["o"] is None:
                objects.pop(key, None)
            else:
                objects[key] = entry["o"]
        for (collection, name), obj in objects.items():
            self._store.load(collection, name, obj)
        self._store.restart_at(max(version, self._store.version))

    def _record(self, collection: Collection, change: Change) -> None:
        if self._file is None:
            return
        text = change.new.text if change.new is not None else None
        self._write(self._file, collection, change.name, change.version, text)
        self._file.flush()
        if self._bytes > self._compact_at:
            self._compact()

    def _write(
        self, file: BufferedWriter, collection: Collection, name: Name, version: int, text: bytes | None
    ) -> None:
        head = json.dumps({"c": collection, "n": name, "v": version}, separators=(",", ":")).encode()
        line = head[:-1] + b',"o":' + (text or b"null") + b"}\n"
        self._bytes += len(line)
        file.write(line)

    def _compact(self) -> None:
        """Writes what is current to a new file and puts it in the old one's place."""
        fresh = self._path.with_suffix(".new")
        self._bytes = 0
        file = fresh.open("wb")
        for collection, name, stored in self._store.everything():
            self._write(file, collection, name, stored.version, stored.text)
        # the newest version may be that of a deletion: no later object may get it again
        self._write(file, ("", ""), ("", ""), self._store.version, None)
        file.flush()
        os.replace(fresh, self._path)
        if self._file is not None:
            self._file.close()
        self._file = file
        self._compact_at = max(_MIN_COMPACT_BYTES, 4 * self._bytes)

    def close(self) -> None:
        """Ends recording and gives the directory free."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None
