"""A reverse proxy before an API server that notes every request and can fail on demand."""

import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from aiohttp import web

from support.serving_end import end_serving

HOP_HEADERS = {"transfer-encoding", "content-length", "connection", "host", "content-encoding", "accept-encoding"}


@dataclass(frozen=True)
class Seen:
    """One request."""

    method: str
    """WATCH for a GET that watches."""
    path: str
    status: int
    is_unguarded: bool = False
    """It changed an object without naming the uid and the version of what it had seen, or made one that may have been
    there already."""

    @property
    def permission(self) -> tuple[str, str, str] | None:
        """(group, resource, verb); None for discovery, which everyone may do."""
        parts = self.path.strip("/").split("/")
        group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1] if len(parts) > 1 else "", parts[3:])
        if not rest or parts[0] not in ("api", "apis"):
            return None
        assert rest[0] == "namespaces", f"{self.path} is not namespaced"
        resource, name, sub = (*rest[2:], None, None)[:3]
        assert resource is not None
        verbs = {"GET": "get" if name else "list", "WATCH": "watch", "POST": "create", "PATCH": "patch"}
        verbs |= {"PUT": "update", "DELETE": "delete"}
        return group, f"{resource}/{sub}" if sub else resource, verbs[self.method]


def granted_by(role: dict[str, Any]) -> set[tuple[str, str, str]]:
    """(group, resource, verb) of all that a Role allows."""
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@dataclass
class RecordingProxy:
    """`url` stands for `upstream`; `seen` holds what was asked."""

    upstream: str
    seen: list[Seen] = field(default_factory=list)
    fault: Callable[[web.Request], web.Response | None] | None = None
    """Answers instead of the API server when it returns a response."""
    delay: Callable[[web.Request], Awaitable[None]] | None = None
    """Awaited before a request goes on, with its whole body: for requests that arrive late."""
    is_cut: bool = False
    """No answer at all: connections break."""
    broken: int = 0
    """Requests that had no answer since."""
    url: str = ""

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)
        )
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_serving(self._runner)
        await self._session.close()

    def writes(self) -> list[Seen]:
        """Requests that were meant to change something."""
        return [seen for seen in self.seen if seen.method not in ("GET", "WATCH")]

    def _cut(self, request: web.Request) -> bool:
        if self.is_cut and request.transport is not None:
            self.broken += 1
            request.transport.abort()
        return self.is_cut

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self._cut(request):
            return web.Response()
        if self.fault is not None and (answer := self.fault(request)) is not None:
            self.seen.append(Seen(_verb(request), request.path, answer.status))
            return answer
        headers = {key: value for key, value in request.headers.items() if key.lower() not in HOP_HEADERS}
        body = await request.read()
        if self.delay is not None:
            await self.delay(request)
        async with self._session.request(
            request.method, self.upstream + str(request.rel_url), data=body, headers=headers
        ) as upstream:
            unguarded = request.method not in ("GET", "POST") and not _is_guarded(body, upstream.status)
            self.seen.append(Seen(_verb(request), request.path, upstream.status, unguarded))
            kept = {key: value for key, value in upstream.headers.items() if key.lower() not in HOP_HEADERS}
            response = web.StreamResponse(status=upstream.status, headers=kept)
            with contextlib.suppress(ConnectionResetError):  # the client went away
                await response.prepare(request)
                async for chunk in upstream.content.iter_any():
                    if self._cut(request):
                        break
                    await response.write(chunk)
                await response.write_eof()
            return response


def _verb(request: web.Request) -> str:
    return "WATCH" if request.query.get("watch") in ("1", "true") else request.method


def _is_guarded(body: bytes, status: int) -> bool:
    """Whether what has this answer would change nothing if it came late. What is made has no uid yet."""
    decoded = json.loads(body or b"{}")
    known = decoded.get("preconditions") or decoded.get("metadata") or {}
    return status >= 400 or bool(known.get("resourceVersion") and (known.get("uid") or status == 201))
