"""A thin asyncio client of any Kubernetes API server."""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from pagefleet_localcluster.kubeconfig import Kubeconfig
from pagefleet_localcluster.objects import Object

REQUEST_TIMEOUT_SECONDS = 30.0
MAX_EVENT_BYTES = 8 << 20
"""The longest watch event that is read; an API server stores objects of up to 1.5 MiB."""


class ApiError(Exception):
    """The API server answered with a Status of failure."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message

    @classmethod
    def of(cls, code: int, text: str) -> "ApiError":
        """From an HTTP status and body: a Status object, or any text (cut to 500 characters)."""
        try:
            status = json.loads(text)
            return cls(code, str(status.get("reason") or "Unknown"), str(status.get("message") or ""))
        except (ValueError, AttributeError):
            return cls(code, "Unknown", text[:500])


UNREACHABLE = (aiohttp.ClientError, TimeoutError, ConnectionError)
"""What a request raises when the API server cannot be reached."""


@dataclass(frozen=True)
class Resource:
    """A collection that the API serves."""

    api_version: str
    """`v1` or `group/version`."""
    plural: str
    kind: str
    namespaced: bool = True

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """The URL path of the collection, an object or a subresource."""
        parts = ["/api" if "/" not in self.api_version else "/apis", self.api_version]
        if namespace and self.namespaced:
            parts += ["namespaces", namespace]
        return "/".join([*parts, self.plural, *(part for part in (name, subresource) if part)])


PODS = Resource("v1", "pods", "Pod")
NODES = Resource("v1", "nodes", "Node", namespaced=False)
SERVICES = Resource("v1", "services", "Service")
EVENTS = Resource("v1", "events", "Event")
CONFIG_MAPS = Resource("v1", "configmaps", "ConfigMap")
SECRETS = Resource("v1", "secrets", "Secret")
CLAIMS = Resource("v1", "persistentvolumeclaims", "PersistentVolumeClaim")
RESOURCE_QUOTAS = Resource("v1", "resourcequotas", "ResourceQuota")
DEPLOYMENTS = Resource("apps/v1", "deployments", "Deployment")
REPLICA_SETS = Resource("apps/v1", "replicasets", "ReplicaSet")
ENDPOINT_SLICES = Resource("discovery.k8s.io/v1", "endpointslices", "EndpointSlice")
DISRUPTION_BUDGETS = Resource("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget")
LEASES = Resource("coordination.k8s.io/v1", "leases", "Lease")

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"


class Client:
    """One API server, one connection pool. Use as an async context manager.

    Every method raises ApiError for a refusal and one of UNREACHABLE when there is no answer."""

    def __init__(self, kubeconfig: Kubeconfig, *, user_agent: str = "pagefleet-local") -> None:
        self._kubeconfig = kubeconfig
        self._user_agent = user_agent
        self._session: aiohttp.ClientSession | None = None

    @property
    def node_token(self) -> str:
        """What this cluster's API server shows to nodes; empty when it is not known."""
        return self._kubeconfig.node_token

    async def __aenter__(self) -> Self:
        headers = {"User-Agent": self._user_agent, "Accept": "application/json"}
        if self._kubeconfig.token:
            headers["Authorization"] = f"Bearer {self._kubeconfig.token}"
        tls = self._kubeconfig.ssl_context
        self._session = aiohttp.ClientSession(
            headers=headers, connector=aiohttp.TCPConnector(limit=0, ssl=tls if tls is not None else True)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Object:
        """One request and its decoded JSON answer."""
        data = None if body is None else json.dumps(body)
        async with self._open().request(
            method,
            self._kubeconfig.server + path,
            params=query,
            data=data,
            headers={"Content-Type": content_type} if data is not None else None,
            timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS),
        ) as response:
            text = await response.text()
            if response.status >= 400:
                raise ApiError.of(response.status, text)
            answer: Object = json.loads(text)
            return answer

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Object:
        """One object."""
        return await self.request("GET", resource.path(namespace, name))

    async def list(self, resource: Resource, namespace: str | None = None, **query: str) -> Object:
        """A whole collection (`labelSelector`, `fieldSelector` in `query`): the List object."""
        return await self.request("GET", resource.path(namespace), query=query)

    async def create(
        self, resource: Resource, body: Object, namespace: str | None = None, subresource: tuple[str, str] | None = None
    ) -> Object:
        """POST to the collection, or to `(name, subresource)` such as a pod's binding."""
        name, sub = subresource or (None, None)
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        return await self.request("POST", resource.path(namespace, name, sub), body=body)

    async def replace(self, resource: Resource, body: Object, subresource: str | None = None) -> Object:
        """PUT an object, with its resourceVersion as the precondition when it carries one."""
        metadata = body["metadata"]
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        path = resource.path(metadata.get("namespace"), metadata["name"], subresource)
        return await self.request("PUT", path, body=body)

    async def patch(
        self,
        resource: Resource,
        name: str,
        body: Any,
        namespace: str | None = None,
        *,
        subresource: str | None = None,
        content_type: str = MERGE,
    ) -> Object:
        """PATCH an object or subresource."""
        path = resource.path(namespace, name, subresource)
        return await self.request("PATCH", path, body=body, content_type=content_type)

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        grace_seconds: int | None = None,
    ) -> Object:
        """DELETE an object in the background; `uid` makes it a precondition."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        return await self.request("DELETE", resource.path(namespace, name), body=options)

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        resource_version: str,
        timeout_seconds: int = 300,
        **query: str,
    ) -> AsyncIterator[tuple[str, Object]]:
        """(type, object) events after `resource_version`, bookmarks included, until the server ends the stream.

        An ERROR event raises ApiError: code 410 asks for a new list."""
        query |= {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": resource_version}
        query["timeoutSeconds"] = str(timeout_seconds)
        idle = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=timeout_seconds + 30)
        url = self._kubeconfig.server + resource.path(namespace)
        async with self._open().get(url, params=query, timeout=idle) as response:
            if response.status >= 400:
                raise ApiError.of(response.status, await response.text())
            buffer = bytearray()
            async for chunk in response.content.iter_any():
                buffer += chunk
                *lines, rest = buffer.split(b"\n")
                buffer = rest
                if len(buffer) > MAX_EVENT_BYTES:
                    raise ApiError(500, "InternalError", f"a watch event of more than {MAX_EVENT_BYTES} bytes")
                for line in filter(None, lines):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise ApiError(status.get("code", 500), status.get("reason", ""), status.get("message", ""))
                    yield event["type"], event["object"]

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the client is closed: use `async with Client(...)`")
        return self._session
