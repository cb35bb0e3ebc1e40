"""Brings a model of a hub onto this machine: once per folder, resumable, checked, and published by one rename.

    DIRECTORY/org--name/COMMIT/            whole and hashed; what a server loads
    DIRECTORY/org--name/COMMIT.partial/    being written by the owner of COMMIT.lock
    DIRECTORY/org--name/refs/REVISION      the commit that the revision was when it was first asked for

A revision that lies here is not asked for again: replicas that share the folder, and a server that is started again,
serve the same weights, with or without a hub. Torch-free, runs in the API process's event loop.
"""

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from pagefleet_server.log import LOGGER
from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.cache_lock import BEAT_SECONDS, STALE_SECONDS, CacheLock
from pagefleet_server.models.hub import COMMIT, HubFile, HubModel, read_listing, select
from pagefleet_server.models.hub_client import HubClient, TransientError

POLL_SECONDS = 1.0
"""A server that waits for another one's download looks this often."""
PARALLEL_FILES = 4
MAX_TRIES = 6
"""Tries in a row that brought nothing; with the pauses between them about a minute."""
PROGRESS_BYTES = 1024 * 1024
"""A try that brought so much is no failure."""
MAX_PAUSE_SECONDS = 30.0
MAX_DAMAGED = 2
"""Times that one file may arrive whole and wrong."""


class DownloadError(Exception):
    """The download failed for now: starting again may help. The message says why and what to do."""


@dataclass(slots=True)
class Progress:
    """How far it is, for /startupz and metrics. Bytes."""

    state: str = "asking the hub"
    done_bytes: int = 0
    total_bytes: int = 0
    """0: not known yet."""
    finished: bool = False

    def __str__(self) -> str:
        if not self.total_bytes:
            return self.state
        return f"{self.state}: {self.percent} % ({self.done_bytes} of {self.total_bytes} bytes)"

    @property
    def percent(self) -> int:
        """Whole percent, rounded down."""
        return 100 * self.done_bytes // self.total_bytes if self.total_bytes else 0


class Download:
    """One model. run() once; `progress` may be read at any time."""

    def __init__(
        self,
        model: HubModel,
        directory: Path,
        hub: HubClient,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        self._model = model
        self._hub = hub
        self._clock = clock
        self._sleep = sleep
        self._stale_seconds = stale_seconds
        self._home = directory / model.repo.replace("/", "--")
        self._ref = self._home / "refs" / quote(model.revision, safe="")
        self._parallel = asyncio.Semaphore(PARALLEL_FILES)
        self.progress = Progress()

    async def run(self) -> Path:
        """Path of the directory or .gguf file. Raises ModelError or DownloadError."""
        path = await self._find()
        self.progress.finished = True
        return path

    async def _find(self) -> Path:
        try:
            found = self._published(self._known_commit())
            if found is not None:
                LOGGER.info("%s@%s is here: %s", self._model.repo, self._model.revision, found)
                return found
            if self._hub.offline:
                raise ModelError(
                    f"{self._model.repo}@{self._model.revision} is not in {self._home} and HF_HUB_OFFLINE is set: "
                    "download it first, or unset HF_HUB_OFFLINE"
                )
            self._home.parent.mkdir(parents=True, exist_ok=True)  # before the hub's part, which may take long to fail
            commit, files = await self._list()
            self._ref.parent.mkdir(parents=True, exist_ok=True)
            path = await self._bring(commit, files)
            self._remember(commit)
            return path
        except OSError as error:
            raise DownloadError(
                f"{self._home} cannot be written: {error.strerror or error}; check the volume"
            ) from error

    def _known_commit(self) -> str | None:
        if COMMIT.fullmatch(self._model.revision):
            return self._model.revision
        with contextlib.suppress(OSError, UnicodeDecodeError):
            commit = self._ref.read_text()
            if COMMIT.fullmatch(commit):
                return commit
        return None

    def _remember(self, commit: str) -> None:
        """Atomically: a crash leaves no half name."""
        fresh = self._ref.with_name(f"{self._ref.name}.{os.getpid()}.new")
        fresh.write_text(commit)
        fresh.replace(self._ref)

    def _key(self, commit: str) -> str:
        """Name of the folder: a single file of a commit has one of its own."""
        return commit if self._model.file is None else f"{commit}.{quote(self._model.file, safe=' ')}"

    def _published(self, commit: str | None) -> Path | None:
        if commit is None:
            return None
        folder = self._home / self._key(commit)
        path = folder if self._model.file is None else folder / Path(self._model.file).name
        return path if path.exists() else None

    async def _list(self) -> tuple[str, list[HubFile]]:
        tries = 0
        while True:
            try:
                answer = await self._hub.list_files(self._model)
                break
            except TransientError as error:
                tries += 1
                await self._pause(tries, error)
        commit, files = read_listing(self._model.repo, answer)
        return commit, select(self._model, files)

    async def _pause(self, failures: int, error: TransientError) -> None:
        if failures >= MAX_TRIES:
            raise DownloadError(f"{self._model.repo}: {error}; {failures} tries brought nothing: check HF_ENDPOINT")
        wait = min(MAX_PAUSE_SECONDS, max(error.retry_after_seconds, 2.0 ** (failures - 1)))
        LOGGER.warning("downloading %s: %s; again in %.0f s", self._model.repo, error, wait)
        await self._sleep(wait)

    async def _bring(self, commit: str, files: list[HubFile]) -> Path:
        """Write it ourselves, or wait for the one who does."""
        self.progress.total_bytes = sum(file.size for file in files)
        partial = self._home / f"{self._key(commit)}.partial"
        lock = CacheLock(self._home / f"{self._key(commit)}.lock", clock=self._clock, stale_seconds=self._stale_seconds)
        while True:
            found = self._published(commit)
            if found is not None:
                return found
            if not lock.try_acquire():
                self.progress.state = "waiting for another replica's download"
                self.progress.done_bytes = await asyncio.to_thread(_size_of, partial)
                await self._sleep(POLL_SECONDS)
                continue
            try:
                if self._published(commit) is None and await self._write(lock, partial, commit, files):
                    partial.rename(self._home / self._key(commit))
            finally:
                lock.release()

    async def _write(self, lock: CacheLock, partial: Path, commit: str, files: list[HubFile]) -> bool:
        """Fill the folder. False when the lock was lost meanwhile: someone else goes on."""
        self._check_room(partial)
        LOGGER.info("downloading %s at %s: %d bytes", self._model.repo, commit, self.progress.total_bytes)
        self.progress.state, self.progress.done_bytes = "fetching", 0
        model = replace(self._model, revision=commit)  # a branch may move meanwhile
        tasks = [asyncio.create_task(self._fetch(model, file, partial), name=file.name) for file in files]
        pending = set(tasks)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=BEAT_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
                if not await asyncio.to_thread(lock.beat):  # a slow volume must not stop the probes
                    LOGGER.warning("another replica took the download of %s over", self._model.repo)
                    return False
            return True
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check_room(self, partial: Path) -> None:
        partial.mkdir(exist_ok=True)
        needed = self.progress.total_bytes - _size_of(partial)
        free = shutil.disk_usage(partial).free
        if needed > free:
            raise ModelError(
                f"{self._model.repo} needs {needed} more bytes and {partial.parent} has {free} left: give it more room"
            )

    async def _fetch(self, model: HubModel, file: HubFile, folder: Path) -> None:
        """Until the file is whole and right. Raises ModelError or DownloadError."""
        path = folder / Path(file.name).name
        failures = damaged = counted = 0
        async with self._parallel:
            while True:
                begun = path.stat().st_size if path.exists() else 0
                if begun > file.size:
                    path.unlink()
                    begun = 0
                self.progress.done_bytes += begun - counted
                counted = begun
                try:
                    if begun < file.size or not path.exists():
                        async for written in self._append(model, file, path, begun):
                            self.progress.done_bytes += written - counted
                            counted = written
                except TransientError as error:
                    failures = failures + 1 if counted - begun < PROGRESS_BYTES else 1
                    await self._pause(failures, error)
                    continue
                if await asyncio.to_thread(file.is_whole, path):
                    return
                damaged += 1
                path.unlink()
                LOGGER.warning("%s of %s arrived damaged", file.name, self._model.repo)
                if damaged >= MAX_DAMAGED:
                    raise DownloadError(
                        f"{file.name} of {self._model.repo} arrived {damaged} times with a wrong hash: check the proxy"
                    )

    async def _append(self, model: HubModel, file: HubFile, path: Path, begun: int) -> AsyncIterator[int]:
        """Write what is missing; gives the file's length after each piece. Raises TransientError or ModelError."""
        async with self._hub.open(model, file, begun) as (start, pieces):
            with _open_at(path, start) as target:
                length = start
                async for piece in pieces:
                    length += len(piece)
                    if length > file.size:
                        raise TransientError(f"{file.name} is longer than the hub said")
                    await asyncio.to_thread(target.write, piece)
                    yield length
                await asyncio.to_thread(_flush, target)
        if length < file.size:
            raise TransientError(f"{file.name} ended after {length} of {file.size} bytes")


def _open_at(path: Path, start: int) -> BinaryIO:
    """The file, cut to `start` bytes, to write on from there."""
    file = path.open("r+b" if path.exists() else "wb")
    file.truncate(start)
    file.seek(start)
    return file


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _size_of(folder: Path) -> int:
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat().st_size for entry in entries)
    except OSError:
        return 0


def default_directory(environ: Mapping[str, str]) -> Path:
    """$PAGEFLEET_CACHE_DIR/models, else $XDG_CACHE_HOME/pagefleet/models, else ~/.cache/pagefleet/models."""
    if environ.get("PAGEFLEET_CACHE_DIR"):
        return Path(environ["PAGEFLEET_CACHE_DIR"]) / "models"
    home = environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "pagefleet" / "models"


def make_download(model: HubModel, directory: str | None, environ: Mapping[str, str]) -> Download:
    """With the hub, the token and the folder that the environment names."""
    return Download(model, Path(directory) if directory else default_directory(environ), HubClient.from_environment())
