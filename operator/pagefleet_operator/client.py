"""The one place that talks to the API server. `kubernetes.aio` gives configuration, credentials and transport.

Paths are built here, so that callers name kinds and objects, never URLs. Every failure is an ApiError; nothing is
retried here, the level-triggered loops above do that.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import ConfigException, load_incluster_config
from kubernetes.aio.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION, load_kube_config

from pagefleet_operator import names
from pagefleet_operator.errors import ApiError, OperatorError
from pagefleet_operator.resources import Resource
from pagefleet_operator.settings import ApiSettings

Json = dict[str, Any]

APPLY_PATCH = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"

IN_CLUSTER_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach the API server: the loaded configuration and the namespace that it implies."""

    configuration: Configuration
    default_namespace: str


@dataclass(frozen=True, slots=True)
class Listed:
    """A collection at one moment."""

    items: list[Json]
    resource_version: str
    """The moment: everything that happened later has a higher version."""


async def load_access() -> Access:
    """From KUBECONFIG or ~/.kube/config, else the pod's service account. Raises OperatorError when neither works."""
    configuration = Configuration()
    try:
        loader = await load_kube_config(config_file=KUBE_CONFIG_DEFAULT_LOCATION, client_configuration=configuration)
    except (ConfigException, OSError) as no_kubeconfig:
        try:
            load_incluster_config(client_configuration=configuration)
        except ConfigException as no_cluster:
            raise OperatorError(
                f"no access to a cluster: kubeconfig {KUBE_CONFIG_DEFAULT_LOCATION}: {no_kubeconfig}; "
                f"service account: {no_cluster}; set KUBECONFIG or run in a pod"
            ) from no_cluster
        return Access(configuration, pod_namespace() or "default")
    return Access(configuration, _context_namespace(loader) or "default")


def pod_namespace() -> str | None:
    """Of the pod that this process runs in; None outside a cluster."""
    return IN_CLUSTER_NAMESPACE.read_text().strip() if IN_CLUSTER_NAMESPACE.is_file() else None


def _context_namespace(loader: Any) -> str | None:
    context = loader.current_context.get("context") or {}
    namespace = context.get("namespace")
    return namespace if isinstance(namespace, str) else None


def _connect(access: Access) -> tuple[Configuration, RESTClientObject]:
    access.configuration.client_session_kwargs = {"trust_env": False}
    return access.configuration, RESTClientObject(access.configuration)


class Api:
    """Requests to the API server. One per process; use as an async context manager."""

    def __init__(
        self,
        access: Access,
        settings: ApiSettings,
        *,
        renew: Callable[[], Awaitable[Access]] = load_access,
    ) -> None:
        """`renew` gives fresh credentials when the API server no longer takes ours."""
        self._configuration, self._rest = _connect(access)
        self._renew = renew
        self._renewing = asyncio.Lock()
        self._timeout = aiohttp.ClientTimeout(
            total=settings.request_timeout_seconds, sock_connect=settings.connect_timeout_seconds
        )
        self.observe_request: Callable[[str, str, int], None] | None = None
        """Called with (method, path, status) after every answer: for metrics."""
        self.may_write: Callable[[], bool] | None = None
        """Asked before every write, those of leases apart: False refuses it (the lease is lost)."""
        self.before_write: Callable[[], None] | None = None
        """Called when such a write goes out."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._rest.close()

    async def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        """The object, or None when there is none."""
        try:
            return await self._request("GET", resource.path(namespace, name))
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    async def list(self, resource: Resource, namespace: str | None, *, labels: str | None = None) -> Listed:
        """All objects of a kind, in pages of 500."""
        items: list[Json] = []
        query = {"limit": "500"}
        if labels:
            query["labelSelector"] = labels
        while True:
            page = await self._request("GET", resource.path(namespace), query=query)
            items.extend(page.get("items") or [])
            metadata = page.get("metadata") or {}
            token = metadata.get("continue")
            if not token:
                return Listed(items, str(metadata.get("resourceVersion", "")))
            query["continue"] = token

    async def apply(self, resource: Resource, manifest: Json) -> Json:
        """Server-side apply of a whole child: takes over the fields in it, gives up those that left it."""
        metadata = manifest["metadata"]
        return await self._request(
            "PATCH",
            resource.path(metadata["namespace"], metadata["name"]),
            query={"fieldManager": names.FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"},
            body=manifest,
            content_type=APPLY_PATCH,
        )

    async def patch(
        self, resource: Resource, namespace: str, name: str, body: Json, *, subresource: str | None = None
    ) -> Json:
        """Merge patch of an object or of a subresource."""
        return await self._request(
            "PATCH",
            resource.path(namespace, name, subresource),
            query={"fieldManager": names.FIELD_MANAGER},
            body=body,
            content_type=MERGE_PATCH,
        )

    async def create(self, resource: Resource, namespace: str, body: Json, *, fenced: bool = True) -> Json:
        """Create an object."""
        return await self._request("POST", resource.path(namespace), body=body, fenced=fenced)

    async def replace(self, resource: Resource, namespace: str, name: str, body: Json, *, fenced: bool = True) -> Json:
        """Replace an object; its resourceVersion is the precondition."""
        return await self._request("PUT", resource.path(namespace, name), body=body, fenced=fenced)

    async def delete(self, resource: Resource, namespace: str, name: str, *, uid: str, version: str) -> None:
        """Delete exactly this object in this state; one that is gone already is no failure."""
        preconditions = {"uid": uid, "resourceVersion": version}
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": preconditions}
        try:
            await self._request("DELETE", resource.path(namespace, name), body=body)
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise

    async def is_served(self, resource: Resource) -> bool:
        """Whether the API server knows the kind: False until its CRD is installed."""
        try:
            found = await self._request("GET", resource.root)
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return False
            raise
        return any(item.get("name") == resource.plural for item in found.get("resources") or [])

    async def version(self) -> tuple[int, int]:
        """(major, minor) of the API server."""
        answer = await self._request("GET", "/version")
        digits = ["".join(filter(str.isdigit, str(answer.get(part, "0")))) for part in ("major", "minor")]
        return int(digits[0] or 0), int(digits[1] or 0)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
        fenced: bool = True,
    ) -> Json:
        if fenced and method != "GET":
            if self.may_write is not None and not self.may_write():
                raise ApiError(status=0, reason="NotLeader", message=f"{method} {path} was not sent: the lease is lost")
            if self.before_write is not None:
                self.before_write()
        target = path + (f"?{urlencode(query)}" if query else "")
        used = self._configuration
        answer, data = await self._send(method, target, body, content_type)
        if answer.status == HTTPStatus.UNAUTHORIZED:
            await self._log_in_again(used)
            answer, data = await self._send(method, target, body, content_type)
        if self.observe_request is not None:
            self.observe_request(method, path, answer.status)
        if not 200 <= answer.status < 300:
            raise _failure(answer.status, data, answer.headers.get("Retry-After"))
        try:
            decoded = json.loads(data)
        except ValueError as error:
            raise ApiError(status=0, reason="BadAnswer", message=f"{method} {path}: no JSON") from error
        if not isinstance(decoded, dict):
            raise ApiError(status=0, reason="BadAnswer", message=f"{method} {path}: no JSON object")
        return decoded

    async def _send(self, method: str, target: str, body: Json | None, content_type: str) -> tuple[Any, bytes]:
        """(response, body) of one request. Raises ApiError when there is no answer."""
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": names.FIELD_MANAGER}
        headers.update(await self._authorization())
        url = self._configuration.host.rstrip("/") + target
        try:
            answer = await self._rest.request(method, url, headers=headers, body=body, _request_timeout=self._timeout)
            return answer, await answer.read()
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            text = str(error) or type(error).__name__
            raise ApiError(status=0, reason="Unreachable", message=f"{method} {target}: {text}") from error

    async def _log_in_again(self, used: Configuration) -> None:
        """Take fresh credentials unless another request has done so since `used`. Raises ApiError."""
        async with self._renewing:
            if self._configuration is not used:
                return
            try:
                access = await self._renew()
            except OperatorError as error:
                raise ApiError(status=401, reason="Unauthorized", message=str(error)) from error
            old = self._rest
            self._configuration, self._rest = _connect(access)
            await old.close()

    async def _authorization(self) -> dict[str, str]:
        settings: Mapping[str, Mapping[str, Any]] = await self._configuration.auth_settings()
        bearer = settings.get("BearerToken")
        return {"Authorization": str(bearer["value"])} if bearer and bearer["value"] else {}


UNKNOWN_FIELD = "failed to create typed patch object"


def _failure(status: int, data: bytes, retry_after: str | None) -> ApiError:
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    known = answer if isinstance(answer, dict) else {}
    if status == 500 and UNKNOWN_FIELD in str(known.get("message")):
        status = 422  # how an API server refuses an unknown field in server-side apply
    return ApiError(
        status=status,
        reason=str(known.get("reason") or (HTTPStatus(status).phrase if status in set(HTTPStatus) else "Error")),
        message=str(known.get("message") or data[:512].decode(errors="replace")),
        retry_after_seconds=float(retry_after) if retry_after and retry_after.isdigit() else None,
    )
