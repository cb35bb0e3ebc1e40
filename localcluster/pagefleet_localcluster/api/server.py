"""The API server: one aiohttp application over one cluster."""

import asyncio
import hmac
import ipaddress
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from pagefleet_localcluster.api import discovery, openapi, rbac, writes
from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.collector import Collector
from pagefleet_localcluster.api.crds import COLLECTION as CRDS
from pagefleet_localcluster.api.crds import resources_of
from pagefleet_localcluster.api.errors import ApiError
from pagefleet_localcluster.api.event_expiry import run_expiry
from pagefleet_localcluster.api.handlers import WARNINGS, Handlers, with_warnings
from pagefleet_localcluster.api.journal import Journal
from pagefleet_localcluster.api.rbac import ADMINISTRATORS, ANONYMOUS, Access, User, verb_of
from pagefleet_localcluster.api.request_info import MAX_BODY_BYTES, Target, decode_object, parse_target
from pagefleet_localcluster.api.store import Change, Collection
from pagefleet_localcluster.kubeconfig import node_token

Json = dict[str, Any]
_LOG = logging.getLogger(__name__)
_OPEN_PATHS = ("/healthz", "/livez", "/readyz", "/version")
_FIRST_NAMESPACES = ("default", "kube-system", "kube-node-lease", "kube-public")
_TOKEN_PREFIX = "/token/"
_SHUTDOWN_SECONDS = 0.2


class ApiServer:
    """A Kubernetes API on plain HTTP.

    `port` 0 takes a free one. `token`: the bearer token of the cluster administrator. `users`: further tokens and who
    holds them; what they may do is up to their role bindings. `host` must be a loopback address (ValueError).
    `data_dir`: where objects survive a restart; None keeps them in memory. `clock`: seconds since the epoch."""

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        data_dir: Path | None = None,
        clock: Callable[[], float] = time.time,
        users: Mapping[str, User] | None = None,
    ) -> None:
        if not ipaddress.ip_address(host).is_loopback:
            raise ValueError(f"host {host} is no loopback address: tokens would cross the network in clear text")
        self._host, self._port, self._token = host, port, token
        self._users = {token: User("admin", (ADMINISTRATORS,)), **(users or {})}
        self.cluster = Cluster(clock)
        self._journal = Journal(data_dir, self.cluster.store) if data_dir is not None else None
        self._runner: web.AppRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None
        self._handlers: Handlers | None = None

    @property
    def url(self) -> str:
        """Where clients connect; right once started."""
        return f"http://{self._host}:{self._port}"

    @property
    def kubeconfig_url(self) -> str:
        """The `server` of a kubeconfig: kubectl sends no token over plain HTTP, so the path carries it."""
        return f"{self.url}{_TOKEN_PREFIX}{self._token}"

    def is_healthy(self) -> bool:
        """Whether every part of a started server still runs."""
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    async def start(self) -> None:
        """Listens. Raises OSError when the address is taken, JournalError when the data directory is."""
        if self._journal is not None:
            self._journal.open()
            for stored in self.cluster.store.all(CRDS):
                self._serve(stored.obj)
        self.cluster.store.listen(self._on_change)
        collector = Collector(self.cluster)
        for name in _FIRST_NAMESPACES:
            self._create_namespace(name)
        self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {node_token(self._token)}"})
        self._handlers = Handlers(self.cluster, self._session)
        app = web.Application(client_max_size=MAX_BODY_BYTES + 1)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=1024)
        try:
            await site.start()
        except OSError:
            await self.stop()
            raise
        self._port = self._runner.addresses[0][1]
        self._tasks += [asyncio.create_task(collector.run()), asyncio.create_task(run_expiry(self.cluster))]
        for task in self._tasks:
            task.add_done_callback(_report_end)

    async def stop(self) -> None:
        """Ends every request, watches included."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self._journal is not None:
            self._journal.close()

    def _create_namespace(self, name: str) -> None:
        resource = self.cluster.registry.get("", "v1", "namespaces")
        assert resource is not None
        if self.cluster.get(resource, ("", name)) is None:
            body = {"metadata": {"name": name}}
            writes.create(self.cluster, resource, "", body, writes.WriteOptions(manager="pagefleet-local"))

    def _on_change(self, collection: Collection, change: Change) -> None:
        """Serves what a CRD defines as soon as it is stored."""
        if collection != CRDS:
            return
        for stored in (change.old, change.last):
            if stored is not None:
                spec = stored.obj["spec"]
                self.cluster.registry.remove(spec["group"], spec["names"]["plural"])
        if change.new is None:
            self._remove_objects(change.last.obj)
            return
        self._serve(change.new.obj)

    def _serve(self, crd: Json) -> None:
        for resource in resources_of(crd):
            self.cluster.registry.add(resource)

    def _remove_objects(self, crd: Json) -> None:
        """With its CRD, every custom object goes."""
        collection = (crd["spec"]["group"], crd["spec"]["names"]["plural"])
        for name in self.cluster.store.names(collection):
            self.cluster.store.remove(collection, name)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._route(request)
        except ApiError as error:
            return with_warnings(_failure(error), request.get(WARNINGS, ()))
        except web.HTTPRequestEntityTooLarge:
            text = f"Request entity too large: limit is {MAX_BODY_BYTES}"
            return _failure(ApiError(413, "RequestEntityTooLarge", text))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001 - the boundary: one broken request must not end the server
            _LOG.exception("request %s %s failed", request.method, request.path)
            return _failure(ApiError(500, "InternalError", f"Internal error occurred: {str(error)[:300]}"))

    async def _route(self, request: web.Request) -> web.StreamResponse:
        path, token = _split_token(request)
        user = self._authenticate(token) if token else ANONYMOUS
        if path.startswith(_OPEN_PATHS):
            if path == "/version":
                return web.json_response(discovery.VERSION)
            if path != "/livez" and not self.is_healthy():
                raise ApiError(500, "InternalError", "a part of the API server has ended: see its log")
            return web.Response(text="ok")
        found = self._document(path, request.headers.get("Accept", ""))
        if found is not None:
            if user is ANONYMOUS:
                text = f'forbidden: User "{user.name}" cannot get path "{path}"'
                raise ApiError(403, "Forbidden", text, details={})
            return found
        review = await self._review(request, path, user)
        if review is not None:
            return review
        target = parse_target(self.cluster.registry, path)
        if target is None or self._handlers is None:
            return _not_here()
        rbac.check_access(self.cluster, user, _access(request, target))
        return await self._handlers.handle(request, target)

    def _authenticate(self, token: str) -> User:
        for known, user in self._users.items():
            if hmac.compare_digest(token.encode(), known.encode()):
                return user
        raise ApiError(401, "Unauthorized", "Unauthorized")

    def _document(self, path: str, accept: str) -> web.Response | None:
        """Discovery and OpenAPI; None for every other path."""
        registry = self.cluster.registry
        parts = path.strip("/").split("/")
        if path in ("/api", "/apis"):
            core = path == "/api"
            if discovery.wants_aggregated(accept):
                body = discovery.aggregated(registry, core=core)
                return web.Response(body=json.dumps(body), headers={"Content-Type": discovery.AGGREGATED})
            address = f"{self._host}:{self._port}"
            return web.json_response(discovery.api_versions(address) if core else discovery.api_groups(registry))
        if path == "/openapi/v2":
            if openapi.SWAGGER_PROTOBUF in accept:
                return web.Response(body=openapi.swagger_protobuf(), content_type="application/octet-stream")
            return web.json_response(openapi.swagger())
        if path == "/openapi/v3":
            return web.json_response(openapi.index(registry))
        if parts[:2] == ["openapi", "v3"] and len(parts) > 3:
            group, version = ("", parts[3]) if parts[2] == "api" else (parts[3], parts[-1])
            if version not in ({"": ["v1"]} | discovery.group_versions(registry)).get(group, ()):
                return _not_here()
            return web.json_response(openapi.document(registry, group, version))
        if parts[0] == "apis" and len(parts) == 2:
            versions = discovery.group_versions(registry).get(parts[1])
            return web.json_response(discovery.api_group(parts[1], versions)) if versions else _not_here()
        if (parts[0] == "apis" and len(parts) == 3) or (parts[0] == "api" and len(parts) == 2):
            group, version = (parts[1], parts[2]) if parts[0] == "apis" else ("", parts[1])
            found = discovery.api_resources(registry, group, version)
            return web.json_response(found) if found else _not_here()
        return None

    async def _review(self, request: web.Request, path: str, user: User) -> web.Response | None:
        """What users ask about themselves; None for every other path."""
        parts = path.strip("/").split("/")
        if request.method != "POST" or len(parts) != 4 or (parts[1], parts[2]) not in discovery.REVIEWS:
            return None
        plural, kind = discovery.REVIEWS[parts[1], parts[2]]
        if parts[3] != plural:
            return None
        body = decode_object(await request.read(), request.headers.get("Content-Type", ""), kind)
        spec = body.get("spec") or {}
        status: Json = {"userInfo": {"username": user.name, "groups": list(rbac.groups_of(user))}}
        if plural == "selfsubjectaccessreviews":
            status = {"allowed": rbac.is_allowed(self.cluster, user, _wanted_access(spec))}
        answer = {"kind": kind, "apiVersion": f"{parts[1]}/{parts[2]}", "metadata": {}}
        return web.json_response(answer | {"spec": spec, "status": status}, status=201)


def _report_end(task: "asyncio.Task[None]") -> None:
    """A part of the server that ends by a fault is said at once, not when the server stops."""
    if not task.cancelled() and task.exception() is not None:
        _LOG.error("a part of the API server has ended", exc_info=task.exception())


def _split_token(request: web.Request) -> tuple[str, str]:
    """(path, bearer token), the token from the header or from the `/token/TOKEN` before the path."""
    path = request.path
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() != "bearer":
        token = ""
    if path.startswith(_TOKEN_PREFIX):
        carried, _, rest = path.removeprefix(_TOKEN_PREFIX).partition("/")
        path, token = f"/{rest}", token or carried
    return path.rstrip("/") or "/", token.strip()


def _access(request: web.Request, target: Target) -> Access:
    plural, subresource = target.resource.plural, target.subresource
    return Access(
        verb=verb_of(request.method, named=bool(target.name), watching="watch" in request.query),
        group=target.resource.group,
        resource=f"{plural}/{subresource}" if subresource else plural,
        namespace=target.namespace,
        name=target.name,
    )


def _wanted_access(spec: Json) -> Access:
    """The access that a SelfSubjectAccessReview asks about; paths are open to everybody."""
    wanted = spec.get("resourceAttributes") or {}
    resource = str(wanted.get("resource", ""))
    return Access(
        verb=str(wanted.get("verb", "")),
        group=str(wanted.get("group", "")),
        resource=f"{resource}/{wanted['subresource']}" if wanted.get("subresource") else resource,
        namespace=str(wanted.get("namespace", "")),
        name=str(wanted.get("name", "")),
    )


def _failure(error: ApiError) -> web.Response:
    return web.json_response(error.status(), status=error.code, headers=error.headers)


def _not_here() -> web.Response:
    return web.Response(status=404, text="404 page not found\n")
