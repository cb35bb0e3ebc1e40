"""The client: what it sends, and what every kind of answer becomes."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from pagefleet_operator import client
from pagefleet_operator.client import Access, Api, load_access
from pagefleet_operator.errors import ApiError, OperatorError
from pagefleet_operator.resources import CHILDREN, LLMDEPLOYMENTS, PODS
from pagefleet_operator.settings import ApiSettings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SETTINGS = ApiSettings(request_timeout_seconds=0.5, connect_timeout_seconds=0.5)


def access(url: str, token: str = "secret") -> Access:
    return Access(Configuration(host=url, api_key={"BearerToken": f"Bearer {token}"}), "default")


@asynccontextmanager
async def api(handler: Handler, **options: Any) -> AsyncIterator[Api]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with Api(access(f"http://127.0.0.1:{runner.addresses[0][1]}"), SETTINGS, **options) as made:
            yield made
    finally:
        await runner.cleanup()


def answers(status: int, body: Any, **headers: str) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    return handler


async def test_an_apply_takes_over_our_fields_and_refuses_unknown_ones() -> None:
    seen: list[web.Request] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        return web.json_response({"metadata": {}})

    async with api(handler) as made:
        await made.apply(CHILDREN["Deployment"], {"metadata": {"name": "chat", "namespace": "team"}})
    (request,) = seen
    assert (request.method, request.path) == ("PATCH", "/apis/apps/v1/namespaces/team/deployments/chat")
    assert dict(request.query) == {"fieldManager": "pagefleet-operator", "force": "true", "fieldValidation": "Strict"}
    assert request.headers["Content-Type"] == "application/apply-patch+yaml"
    assert request.headers["Authorization"] == "Bearer secret"


async def test_lists_are_read_page_by_page() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.query.get("continue") == "next":
            return web.json_response({"metadata": {"resourceVersion": "7"}, "items": [{"b": 1}]})
        return web.json_response({"metadata": {"continue": "next", "resourceVersion": "7"}, "items": [{"a": 1}]})

    async with api(handler) as made:
        found = await made.list(PODS, None, labels="x=y")
    assert (found.items, found.resource_version) == ([{"a": 1}, {"b": 1}], "7")


@pytest.mark.parametrize(
    ("handler", "status", "is_transient"),
    [
        (answers(404, {"reason": "NotFound", "message": "no"}), 404, False),
        (answers(409, {"reason": "Conflict", "message": "modified"}), 409, True),
        (answers(422, {"reason": "Invalid", "message": "bad"}), 422, False),
        (answers(429, {"reason": "TooManyRequests", "message": "slow"}), 429, True),
        (answers(500, {"message": "etcd"}), 500, True),
        (answers(500, {"message": "failed to create typed patch object: .x: field not declared"}), 422, False),
        (answers(200, [1, 2]), 0, True),
    ],
    ids=["not found", "conflict", "invalid", "storm", "broken", "unknown field in an apply", "no object"],
)
async def test_every_failure_is_an_api_error(handler: Handler, status: int, is_transient: bool) -> None:
    async with api(handler) as made:
        with pytest.raises(ApiError) as error:
            await made.create(PODS, "default", {})
    assert (error.value.status, error.value.is_transient) == (status, is_transient)


async def test_the_servers_wish_to_wait_is_kept() -> None:
    async with api(answers(429, {}, **{"Retry-After": "7"})) as made:
        with pytest.raises(ApiError) as error:
            await made.create(PODS, "default", {})
    assert error.value.retry_after_seconds == 7.0


async def test_an_absent_object_is_none() -> None:
    async with api(answers(404, {"message": "no"})) as made:
        assert await made.get(CHILDREN["Service"], "default", "chat") is None
        assert await made.is_served(LLMDEPLOYMENTS) is False


async def test_nobody_there_is_an_error_of_its_own() -> None:
    async with Api(access("http://127.0.0.1:1"), SETTINGS) as made:
        with pytest.raises(ApiError, match="Unreachable"):
            await made.version()


async def test_without_the_lease_nothing_is_written_but_leases() -> None:
    async with api(answers(201, {"metadata": {}})) as made:
        made.may_write = lambda: False
        with pytest.raises(ApiError, match="the lease is lost"):
            await made.create(PODS, "default", {})
        await made.create(PODS, "default", {}, fenced=False)


async def test_expired_credentials_are_renewed_once_for_all_requests() -> None:
    """Tokens of cloud providers live for minutes: the operator must outlive them."""
    renewals = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer fresh":
            return web.json_response({"reason": "Unauthorized", "message": "expired"}, status=401)
        return web.json_response({"metadata": {}, "items": []})

    async with api(handler) as made:

        async def renew() -> Access:
            nonlocal renewals
            renewals += 1
            return access(made._configuration.host, "fresh")

        made._renew = renew
        await made.list(PODS, None)
        await made.list(PODS, None)
    assert renewals == 1


async def test_credentials_that_stay_refused_are_an_error() -> None:
    async with api(answers(401, {"reason": "Unauthorized", "message": "no"})) as made:

        async def renew() -> Access:
            return access(made._configuration.host)

        made._renew = renew
        with pytest.raises(ApiError) as error:
            await made.list(PODS, None)
    assert error.value.status == 401


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
clusters: [{name: k, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: u, user: {token: t}}]
contexts: [{name: c, context: {cluster: k, user: u, namespace: team}}]
"""


async def test_access_comes_from_the_kubeconfig_with_its_namespace(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "config"
    path.write_text(KUBECONFIG)
    monkeypatch.setattr(client, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    found = await load_access()
    assert (found.configuration.host, found.default_namespace) == ("http://127.0.0.1:9", "team")


async def test_no_access_at_all_says_what_to_set(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(client, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "nothing"))
    with pytest.raises(OperatorError, match="set KUBECONFIG or run in a pod"):
        await load_access()
