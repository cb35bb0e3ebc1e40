"""A small Hugging Face hub on this machine: lists a repository, serves its files in parts, and misbehaves on demand."""

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from aiohttp import web

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class LocalHub:
    """One repository at one commit. Faults are taken one by one from the front."""

    files: dict[str, bytes]
    repo: str = "acme/tiny"
    revisions: tuple[str, ...] = ("main", COMMIT)
    token: str | None = None
    """Asked for when given."""
    statuses: list[int] = field(default_factory=list)
    """Answers of the next requests for content."""
    list_statuses: list[int] = field(default_factory=list)
    """The same for lists."""
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """The next answers with a file's content break off after so many bytes."""
    damage: int = 0
    """So many of the next whole answers have a wrong byte."""
    piece_bytes: int = 1 << 20
    pause_seconds: float = 0.0
    """After each piece."""
    gate: asyncio.Event | None = None
    """Content waits for it after the first piece."""
    ranges: bool = True
    redirect_to: str | None = None
    """Content is fetched from here instead."""
    url: str = ""
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """(path, Range, Authorization) of every request."""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/api/models/{org}/{name}/revision/{revision}", self._list)
        app.router.add_get("/{org}/{name}/resolve/{revision}/{file:.*}", self._file)
        return app

    def _note(self, request: web.Request) -> None:
        headers = request.headers
        self.asked.append((request.path, headers.get("Range", ""), headers.get("Authorization", "")))

    def _refused(self, request: web.Request, statuses: list[int]) -> web.Response | None:
        match = request.match_info
        if f"{match['org']}/{match['name']}" != self.repo or unquote(match["revision"]) not in self.revisions:
            return web.Response(status=404, headers={"X-Error-Message": "Repository not found"})
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401, headers={"X-Error-Message": "Access is restricted"})
        if statuses:
            status = statuses.pop(0)
            return web.Response(status=status, headers={"Retry-After": "7"} if status == 429 else {})
        return None

    async def _list(self, request: web.Request) -> web.Response:
        self._note(request)
        refused = self._refused(request, self.list_statuses)
        if refused is not None:
            return refused
        siblings = [self._sibling(name, content) for name, content in self.files.items()]
        return web.json_response({"id": self.repo, "sha": COMMIT, "siblings": siblings})

    @staticmethod
    def _sibling(name: str, content: bytes) -> dict[str, object]:
        blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        item: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": blob}
        if name.endswith((".safetensors", ".gguf")):
            item["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return item

    async def _file(self, request: web.Request) -> web.StreamResponse:
        self._note(request)
        if self.redirect_to is not None:
            raise web.HTTPFound(f"{self.redirect_to}{request.path}")
        refused = self._refused(request, self.statuses)
        if refused is not None:
            return refused
        content = self.files[request.match_info["file"]]
        begin = int(request.headers["Range"].removeprefix("bytes=").rstrip("-")) if self._has_range(request) else 0
        data = content[begin:]
        if self.damage and data:
            self.damage -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        response = web.StreamResponse(status=206 if begin else 200)
        if begin:
            response.headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        response.content_length = len(data)
        await response.prepare(request)
        cuts = self.cuts.get(request.match_info["file"])
        cut = cuts.pop(0) if cuts else None
        sent = 0
        while sent < len(data):
            piece = data[sent : sent + self.piece_bytes]
            if cut is not None and sent + len(piece) > cut:
                await response.write(piece[: cut - sent])
                assert request.transport is not None
                request.transport.close()
                return response
            await response.write(piece)
            sent += len(piece)
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(self.pause_seconds)
        return response

    def _has_range(self, request: web.Request) -> bool:
        return self.ranges and "Range" in request.headers


def files_of(folder: Path) -> dict[str, bytes]:
    """A model's folder as a repository."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@asynccontextmanager
async def serving(hub: LocalHub) -> AsyncIterator[LocalHub]:
    """The hub on a free port of 127.0.0.1; `hub.url` is its HF_ENDPOINT."""
    runner = web.AppRunner(hub.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    hub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield hub
    finally:
        await runner.cleanup()


class HubThread:
    """The hub in a thread of its own, for tests without a loop."""

    def __init__(self, hub: LocalHub) -> None:
        self.hub = hub
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hub", daemon=True)
        self._stack = AsyncExitStack()

    def __enter__(self) -> LocalHub:
        self._thread.start()
        self._run(self._stack.enter_async_context(serving(self.hub)))
        return self.hub

    def __exit__(self, *_: object) -> None:
        self._run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def open_gate(self) -> None:
        """Let content through."""
        assert self.hub.gate is not None
        self._loop.call_soon_threadsafe(self.hub.gate.set)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)
