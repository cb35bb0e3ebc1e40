"""The embedded API under test: a running server and a client that shows whole answers."""

import asyncio
import contextlib
import datetime
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from pagefleet_localcluster.api.rbac import User
from pagefleet_localcluster.api.server import ApiServer
from support.transcripts import Transcript

Json = dict[str, Any]
TOKEN = "test-token"
VIEWER_TOKEN = "viewertoken"
RECORDED = Path(__file__).resolve().parents[1] / "contract" / "cluster" / "recorded"
MERGE, STRATEGIC, APPLY, JSON_PATCH = (
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
    "application/apply-patch+yaml",
    "application/json-patch+json",
)
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"


@dataclass(frozen=True)
class Answer:
    """One HTTP answer."""

    status: int
    body: Any
    """Parsed JSON, or text."""
    headers: Mapping[str, str]

    def ok(self) -> Json:
        """The body of a success."""
        assert self.status < 300, f"{self.status}: {self.body}"
        assert isinstance(self.body, dict)
        return self.body

    def message(self, status: int) -> str:
        """The message of a failure with this code."""
        assert self.status == status, f"{self.status}: {self.body}"
        return str(self.body["message"])


class Api:
    """Requests to one API server."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, token: str = TOKEN, transcript: Transcript | None = None
    ) -> None:
        self.session, self.url, self.token = session, url, token
        self._transcript = transcript

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        accept: str = "application/json",
        token: str | None = None,
        agent: str = "tests/1",
        **query: str,
    ) -> Answer:
        """One request; `body` may be text or anything that JSON can hold."""
        bearer = self.token if token is None else token
        headers = {"Accept": accept, "User-Agent": agent}
        if bearer:
            headers["Authorization"] = f"Bearer {bearer}"
        data: io.BytesIO | None = None
        if body is not None:
            headers["Content-Type"] = content_type
            text = body if isinstance(body, str | bytes) else json.dumps(body)
            data = io.BytesIO(text.encode() if isinstance(text, str) else text)
        async with self.session.request(method, self.url + path, params=query, headers=headers, data=data) as response:
            text = await response.text()
            parsed = json.loads(text) if text.startswith(("{", "[")) else text
            asked = {"method": method, "path": path, "query": query, "content_type": content_type, "accept": accept}
            if self._transcript is not None:
                self._transcript.add(asked | {"body": body}, response.status, parsed)
            return Answer(response.status, parsed, response.headers.copy())

    async def until(
        self, ask: Callable[[], Awaitable[Answer]], good: Callable[[Answer], bool], *, seconds: float = 60.0
    ) -> Answer:
        """Asks again until the answer is good; fails with the last one after the deadline."""
        end = asyncio.get_running_loop().time() + seconds
        while True:
            answer = await ask()
            if good(answer):
                return answer
            assert asyncio.get_running_loop().time() < end, f"still {answer.status}: {answer.body}"
            await asyncio.sleep(0.02)

    async def get(self, path: str, **options: Any) -> Answer:
        """GET."""
        return await self.request("GET", path, **options)

    async def post(self, path: str, body: Any, **options: Any) -> Answer:
        """POST."""
        return await self.request("POST", path, body, **options)

    async def put(self, path: str, body: Any, **options: Any) -> Answer:
        """PUT."""
        return await self.request("PUT", path, body, **options)

    async def delete(self, path: str, body: Any = None, **options: Any) -> Answer:
        """DELETE."""
        return await self.request("DELETE", path, body, **options)

    async def patch(self, path: str, body: Any, kind: str = MERGE, **options: Any) -> Answer:
        """PATCH with one of the four content types."""
        return await self.request("PATCH", path, body, content_type=kind, **options)

    async def apply(self, path: str, body: Any, manager: str = "tests", **options: Any) -> Answer:
        """Server-side apply."""
        return await self.patch(path, body, APPLY, fieldManager=manager, **options)

    async def watch(self, path: str, *, seconds: int = 1, count: int = 0, **query: Any) -> list[Json]:
        """All events of a watch that lasts this long, or the first `count` ones."""
        query = {"watch": "true", "timeoutSeconds": str(seconds)} | query
        headers = {"Authorization": f"Bearer {self.token}"}
        async with self.session.get(self.url + path, params=query, headers=headers) as response:
            assert response.status == 200, await response.text()
            events: list[Json] = []
            async for line in response.content:
                events.append(json.loads(line))
                if len(events) == count:
                    break
            return events


@contextlib.asynccontextmanager
async def running_api(**options: Any) -> AsyncIterator[tuple[ApiServer, Api]]:
    """A started server on a free port, and a client of it."""
    server = ApiServer("127.0.0.1", 0, TOKEN, users={VIEWER_TOKEN: User("viewer")}, **options)
    await server.start()
    try:
        connector = aiohttp.TCPConnector(limit=0)
        skipped = ("Content-Type", "User-Agent")
        async with aiohttp.ClientSession(connector=connector, skip_auto_headers=skipped) as session:
            yield server, Api(session, server.url)
    finally:
        await server.stop()


async def watching(server: ApiServer, count: int, *, seconds: float = 60.0) -> None:
    """Waits until this many watches of ConfigMaps are open."""
    end = asyncio.get_running_loop().time() + seconds
    while len(server.cluster.store.waiters(("", "configmaps"))) != count:
        assert asyncio.get_running_loop().time() < end, f"there are not {count} watches"
        await asyncio.sleep(0.02)


def draft_crd() -> Json:
    """The CRD that the recordings were made with."""
    found = json.loads((RECORDED / "crd_used.json").read_text())
    assert isinstance(found, dict)
    return found


CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
LLMDS = "/apis/pagefleet.dev/v1alpha1/namespaces/default/llmdeployments"
CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
PODS = "/api/v1/namespaces/default/pods"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"


def llmd(name: str, **spec: Any) -> Json:
    """A valid custom object."""
    head = {"apiVersion": "pagefleet.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": name}}
    return head | {"spec": {"model": {"source": "file:///models/m"}} | spec}


def pod(name: str, *, node: str = "", **spec: Any) -> Json:
    """A valid pod, on a node or not."""
    base: Json = {"containers": [{"name": "server", "image": "img:1", "command": ["x"]}]}
    return {"metadata": {"name": name}, "spec": base | ({"nodeName": node} if node else {}) | spec}


async def ready_node(api: "Api", name: str) -> None:
    """Registers a node that controllers take for alive during a test."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "", "lastHeartbeatTime": now}
    status = {"conditions": [condition | {"lastTransitionTime": now}], "capacity": {"cpu": "1", "pods": "9"}}
    (await api.post("/api/v1/nodes", {"metadata": {"name": name}})).ok()
    (await api.patch(f"/api/v1/nodes/{name}/status", {"status": status})).ok()


def deployment(name: str, **spec: Any) -> Json:
    """A valid Deployment whose pods carry the label app=NAME."""
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": pod(name)["spec"]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {"selector": {"matchLabels": labels}, "template": template} | spec,
    }


def config_map(name: str, *owners: Json, **data: str) -> Json:
    """A ConfigMap, owned or not."""
    meta: Json = {"name": name}
    if owners:
        meta["ownerReferences"] = [owner_reference(owner) for owner in owners]
    return {"metadata": meta, "data": data or {"a": "b"}}


def owner_reference(owner: Json) -> Json:
    """A reference that blocks the owner's foreground deletion."""
    meta = owner["metadata"]
    found = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": meta["name"], "uid": meta["uid"]}
    return found | {"blockOwnerDeletion": True}
