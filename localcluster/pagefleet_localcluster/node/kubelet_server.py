"""The node's own HTTP server: logs of its containers, commands beside them."""

import asyncio
import hmac
import logging
import os
from pathlib import Path
from typing import Protocol

from aiohttp import web

from pagefleet_localcluster.node.container import ContainerRunner
from pagefleet_localcluster.node.exec_session import MAX_FRAME_BYTES, PROTOCOLS, serve_exec
from pagefleet_localcluster.node.pod import PodWorker
from pagefleet_localcluster.node.pod_inputs import HOST_ADDRESS

logger = logging.getLogger(__name__)

FOLLOW_POLL_SECONDS = 0.1
CHUNK_BYTES = 64 << 10


class PodFinder(Protocol):
    """What the server asks of the node."""

    def find(self, namespace: str, name: str) -> PodWorker | None:
        """The worker of a pod."""
        ...


class KubeletServer:
    """Serves `GET /containerLogs/{namespace}/{pod}/{container}` and WebSockets on `/exec/...` on a free port of
    127.0.0.1, to the cluster's API server only."""

    def __init__(self, pods: PodFinder, token: str) -> None:
        """`token`: what callers must show as a bearer token; empty serves nobody."""
        self._pods = pods
        self._token = token
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/containerLogs/{namespace}/{pod}/{container}", self._logs),
                web.get("/exec/{namespace}/{pod}/{container}", self._exec),
                web.get("/healthz", self._health),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST_ADDRESS, 0)
        await site.start()
        self.port = int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Stop listening; followers are cut off."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        worker, runner = self._find(request)
        query = request.query
        for name in ("sinceSeconds", "sinceTime", "timestamps"):
            if query.get(name) not in (None, "", "false"):
                raise web.HTTPBadRequest(text=f"{name}: a process node keeps no times of log lines")
        previous = query.get("previous") == "true"
        number = runner.log_number - previous
        path = worker.folder_of(runner.state.name).log(number)
        if not path.exists():
            kind = "previous terminated " if previous else ""
            raise web.HTTPBadRequest(
                text=f'{kind}container "{runner.state.name}" in pod "{request.match_info["pod"]}" not found'
                if previous
                else f'container "{runner.state.name}" in pod "{request.match_info["pod"]}" is waiting to start: '
                f"{runner.state.state.get('waiting', {}).get('reason', 'ContainerCreating')}"
            )
        tail = int(query["tailLines"]) if query.get("tailLines") else None
        limit = int(query["limitBytes"]) if query.get("limitBytes") else None
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        await _stream(response, path, runner if query.get("follow") == "true" and not previous else None, tail, limit)
        return response

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        _, runner = self._find(request)
        argv = request.query.getall("command", [])
        command = runner.command_beside(argv)
        if not argv or command is None:
            raise web.HTTPBadRequest(text=f"container {runner.state.name} is not running" if argv else "no command")
        socket = web.WebSocketResponse(protocols=PROTOCOLS, max_msg_size=MAX_FRAME_BYTES)
        await socket.prepare(request)
        wants = {name: request.query.get(name) in ("true", "1") for name in ("stdin", "tty")}
        await serve_exec(socket, command, stdin=wants["stdin"], tty=wants["tty"])
        return socket

    def _find(self, request: web.Request) -> tuple[PodWorker, ContainerRunner]:
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not self._token or not hmac.compare_digest(shown.encode(), self._token.encode()):
            raise web.HTTPUnauthorized(text="only the cluster's API server may ask this node")
        info = request.match_info
        worker = self._pods.find(info["namespace"], info["pod"])
        if worker is None:
            raise web.HTTPNotFound(text=f'pod "{info["pod"]}" not found on this node')
        runner = worker.runners.get(info["container"])
        if runner is None:
            raise web.HTTPNotFound(text=f"container {info['container']} not found in pod {info['pod']}")
        return worker, runner


def tail_offset(path: Path, lines: int) -> int:
    """Where the last `lines` lines of a file begin, reading backwards in chunks."""
    if lines <= 0:
        return path.stat().st_size
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        wanted, position = lines, end
        while position > 0:
            start = max(0, position - CHUNK_BYTES)
            file.seek(start)
            chunk = file.read(position - start)
            cut = len(chunk) - (position == end and chunk.endswith(b"\n"))
            while (found := chunk.rfind(b"\n", 0, cut)) >= 0:
                wanted -= 1
                if wanted == 0:
                    return start + found + 1
                cut = found
            position = start
    return 0


async def _stream(
    response: web.StreamResponse, path: Path, follow: ContainerRunner | None, tail: int | None, limit: int | None
) -> None:
    """Send the file from its tail; with `follow`, go on until the container's run has ended."""
    number = follow.log_number if follow is not None else 0
    left = limit
    with path.open("rb") as file:
        file.seek(tail_offset(path, tail) if tail is not None else 0)
        while True:
            ended = follow is None or not follow.state.is_running or follow.log_number != number
            while chunk := file.read(CHUNK_BYTES if left is None else min(left, CHUNK_BYTES)):
                await response.write(chunk)
                left = None if left is None else left - len(chunk)
            if ended or left == 0:
                break
            await asyncio.sleep(FOLLOW_POLL_SECONDS)
            if os.fstat(file.fileno()).st_size < file.tell():
                file.seek(0)  # the node cut the log
    await response.write_eof()
