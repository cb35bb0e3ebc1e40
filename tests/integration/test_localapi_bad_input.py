"""What clients should never send: it is answered as Kubernetes does, and the server stays up."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pagefleet_localcluster.api.server import ApiServer
from support.localapi import (
    APPLY,
    CONFIG_MAPS,
    CRDS,
    DEPLOYMENTS,
    JSON_PATCH,
    LLMDS,
    MERGE,
    PODS,
    TOKEN,
    Api,
    config_map,
    deployment,
    draft_crd,
    llmd,
    pod,
    running_api,
    watching,
)

YAML_BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with running_api() as (_, client):
        (await client.post(CRDS, draft_crd())).ok()
        yield client
        assert (await client.get("/readyz")).status == 200
        assert (await client.get(CONFIG_MAPS)).status == 200


@pytest.mark.parametrize(
    ("body", "content_type", "code", "text"),
    [
        ('{"metadata": ', "application/json", 400, "unexpected end of JSON input"),
        ("{x}", "application/json", 400, "json parse error"),
        ("", "application/json", 400, "unexpected end of JSON input"),
        ("[]", "application/json", 400, "must be of type ConfigMap"),
        ("null", "application/json", 400, "must be of type ConfigMap"),
        ('"text"', "application/json", 400, "must be of type ConfigMap"),
        (b"\xff\xfe{}", "application/json", 400, "must be of type ConfigMap"),
        ("[" * 100_000, "application/json", 400, "max depth"),
        ("a: [", "application/yaml", 400, "error decoding YAML"),
        ("a: &a [*a]", "application/yaml", 400, "error decoding YAML"),
        (YAML_BOMB, "application/yaml", 400, "aliases counted each time"),
        ("just text", "application/yaml", 400, "must be of type ConfigMap"),
        ("x", "text/plain", 415, "unknown format - accepted media types include: application/json, application/yaml"),
        (b"k8s\x00", "application/vnd.kubernetes.protobuf", 415, "`apply -f`"),
        ('{"metadata": "text"}', "application/json", 400, "metadata must be an object"),
        ('{"metadata": {"name": 7}}', "application/json", 400, "cannot unmarshal"),
        ('{"metadata": {"name": "m", "labels": {"a": 1}}}', "application/json", 400, "cannot unmarshal"),
        ('{"kind": "Secret", "metadata": {"name": "m"}}', "application/json", 400, "cannot be handled as a ConfigMap"),
        ('{"apiVersion": "v2", "metadata": {"name": "m"}}', "application/json", 400, "does not match the expected API"),
        ('{"metadata": {"name": "m"}, "data": []}', "application/json", 400, "cannot unmarshal"),
        ('{"metadata": {"name": "../x"}}', "application/json", 422, "RFC 1123 subdomain"),
        ('{"metadata": {"name": "' + "x" * 300 + '"}}', "application/json", 422, "must be no more than 253 characters"),
    ],
)
async def test_bodies_that_are_no_object(api: Api, body: Any, content_type: str, code: int, text: str) -> None:
    answer = await api.post(CONFIG_MAPS, body, content_type=content_type)
    assert text in answer.message(code)
    assert answer.body["kind"] == "Status"


async def test_objects_have_a_largest_size(api: Api) -> None:
    answer = await api.post(CONFIG_MAPS, config_map("big", a="x" * (1536 * 1024)))
    assert "too large" in answer.message(413)
    answer = await api.post(CONFIG_MAPS, config_map("huge", a="x" * (4 * 2**20)))
    assert answer.message(413) == "Request entity too large: limit is 3145728"
    (await api.post(CONFIG_MAPS, config_map("grows", a="x" * 2**20))).ok()
    answer = await api.patch(f"{CONFIG_MAPS}/grows", {"data": {"b": "x" * 2**20}})
    assert "too large" in answer.message(413)
    assert set((await api.get(f"{CONFIG_MAPS}/grows")).ok()["data"]) == {"a"}


@pytest.mark.parametrize(
    ("body", "kind", "codes"),
    [
        ("[1]", JSON_PATCH, {422}),
        ("{}", JSON_PATCH, {400}),
        ('[{"op": "replace", "path": "", "value": 7}]', JSON_PATCH, {400}),
        ('[{"op": "remove", "path": "/metadata"}]', JSON_PATCH, {400}),
        ("[]", MERGE, {400}),
        ('{"metadata": null}', MERGE, {400}),
        ('{"metadata": {"name": "other"}}', MERGE, {400}),
        ('{"metadata": {"namespace": "other"}}', MERGE, {400}),
        ('{"kind": "Secret"}', MERGE, {400}),
        ('{"metadata": {"resourceVersion": "x"}}', MERGE, {409}),
        ("a: [", APPLY, {400}),
        ("[]", APPLY, {400}),
        ("{}", "application/json", {415}),
        ("{}", "", {415}),
    ],
)
async def test_patches_that_are_none(api: Api, body: str, kind: str, codes: set[int]) -> None:
    (await api.post(CONFIG_MAPS, config_map("m"))).ok()
    answer = await api.patch(f"{CONFIG_MAPS}/m", body, kind, fieldManager="x")
    assert answer.status in codes, answer.body
    assert (await api.get(f"{CONFIG_MAPS}/m")).ok()["data"] == {"a": "b"}


@pytest.mark.parametrize(
    "spec", [None, [], "text", 7, {}, {"containers": None}, {"containers": [None]}, {"containers": [7]}]
)
async def test_pods_and_templates_of_every_wrong_shape(api: Api, spec: Any) -> None:
    answers = [
        await api.post(PODS, {"metadata": {"name": "p"}, "spec": spec}),
        await api.post(DEPLOYMENTS, deployment("d") | {"spec": spec}),
        await api.post(DEPLOYMENTS, deployment("d", template={"spec": spec})),
        await api.post(DEPLOYMENTS, deployment("d", selector=spec)),
        await api.post("/api/v1/namespaces/default/services", {"metadata": {"name": "s"}, "spec": spec}),
        await api.post(LLMDS, {"metadata": {"name": "o"}, "spec": spec}),
        await api.apply(f"{DEPLOYMENTS}/d", deployment("d") | {"spec": spec}),
        await api.apply(f"{LLMDS}/o", {"spec": spec}),
    ]
    for answer in answers:  # an applied object that does not fit its schema is 500, as on a real server
        assert answer.status in (400, 422) or "failed to create typed patch" in answer.message(500), answer.body


@pytest.mark.parametrize(
    "change",
    [
        {"versions": []},
        {"versions": [{}]},
        {"versions": None},
        {"names": {}},
        {"names": {"plural": 7, "kind": 8}},
        {"group": None},
        {"scope": "Galaxy"},
    ],
)
async def test_crds_of_every_wrong_shape(api: Api, change: dict[str, Any]) -> None:
    crd = draft_crd()
    crd["metadata"]["name"] = "things.pagefleet.dev"
    crd["spec"] |= change
    answer = await api.post(CRDS, crd)
    assert answer.status in (400, 422), answer.body


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/apis/pagefleet.dev/v1alpha1/namespaces/default/nothings", 404),
        ("GET", "/apis/nothing.dev/v1", 404),
        ("GET", "/apis", 200),
        ("GET", "/nowhere", 404),
        ("GET", "/api/v1/namespaces/default/pods/p/q/r/s", 404),
        ("GET", f"{CONFIG_MAPS}/m/status", 404),
        ("GET", f"{CONFIG_MAPS}/m/scale", 404),
        ("POST", f"{CONFIG_MAPS}/m", 405),
        ("POST", "/api/v1/configmaps", 405),
        ("PUT", CONFIG_MAPS, 400),
        ("PATCH", CONFIG_MAPS, 405),
        ("DELETE", "/api/v1/namespaces", 405),
        ("OPTIONS", CONFIG_MAPS, 405),
        ("GET", f"{PODS}/none/log", 404),
        ("GET", f"{PODS}/none/exec", 404),
        ("POST", f"{PODS}/none/binding", 404),
        ("POST", f"{PODS}/none/eviction", 404),
    ],
)
async def test_paths_that_lead_nowhere(api: Api, method: str, path: str, code: int) -> None:
    body = {"target": {"name": "n"}} if method in ("POST", "PUT") else None
    assert (await api.request(method, path, body)).status == code


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "many"},
        {"labelSelector": "a in ("},
        {"fieldSelector": "nonsense"},
        {"continue": "%%%"},
        {"resourceVersion": "-1"},
        {"watch": "true", "sendInitialEvents": "true"},
        {"watch": "true", "resourceVersion": "x"},
    ],
)
async def test_queries_that_make_no_sense(api: Api, query: dict[str, str]) -> None:
    answer = await api.get(CONFIG_MAPS, **query)
    assert answer.status in (400, 422, 500), answer.body
    assert answer.body["kind"] == "Status"


async def test_logs_of_a_pod_that_nobody_runs_say_why(api: Api) -> None:
    (await api.post(PODS, pod("p"))).ok()
    assert (await api.get(f"{PODS}/p/log")).message(400) == "pod p does not have a host assigned"
    (await api.post(PODS, pod("q", node="gone"))).ok()
    assert (await api.get(f"{PODS}/q/log")).message(404) == 'nodes "gone" not found'
    (await api.post("/api/v1/nodes", {"metadata": {"name": "gone"}})).ok()
    assert "publishes no InternalIP" in (await api.get(f"{PODS}/q/log")).message(500)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    status = {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
    }
    (await api.patch("/api/v1/nodes/gone/status", {"status": status})).ok()
    assert "does not answer" in (await api.get(f"{PODS}/q/log")).message(500)
    assert "is not valid for pod q" in (await api.get(f"{PODS}/q/log", container="none")).message(400)
    assert "WebSocket" in (await api.get(f"{PODS}/q/exec", command="x")).message(400)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::"])
def test_the_server_listens_on_loopback_only(host: str) -> None:
    with pytest.raises(ValueError, match="no loopback address"):
        ApiServer(host, 0, TOKEN)


async def test_no_token_and_a_wrong_one_are_told_apart_from_nothing() -> None:
    async with running_api() as (server, api):
        for token in ("wrong", "ä"):
            assert (await api.get(CONFIG_MAPS, token=token)).message(401) == "Unauthorized"
        assert "system:anonymous" in (await api.get(CONFIG_MAPS, token="")).message(403)
        assert (await api.get(f"/token/{TOKEN}{CONFIG_MAPS}", token="")).status == 200
        assert server.kubeconfig_url.endswith(f"/token/{TOKEN}")


async def test_a_thousand_watches_are_served_and_cost_little() -> None:
    async with running_api() as (server, api):
        version = str(server.cluster.store.version)
        watches = [
            asyncio.create_task(api.watch(CONFIG_MAPS, seconds=60, count=1, resourceVersion=version))
            for _ in range(1000)
        ]
        await watching(server, 1000)
        (await api.post(CONFIG_MAPS, config_map("m"))).ok()
        assert {len(await watch) for watch in watches} == {1}
        await watching(server, 0)


async def test_a_client_that_stops_reading_holds_nothing_back() -> None:
    """The watcher is a position in the history: what it does not take is forgotten with the history."""
    async with running_api() as (server, api):
        reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
        head = f"GET {CONFIG_MAPS}?watch=true HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        writer.write(head.encode())
        await writer.drain()
        (await api.post(CONFIG_MAPS, config_map("m"))).ok()
        for index in range(300):
            (await api.patch(f"{CONFIG_MAPS}/m", {"data": {"a": str(index) + "x" * 100_000}})).ok()
        changes, size = server.cluster.store.history_size()
        assert changes <= 2100
        assert size <= 17 * 2**20
        writer.close()
        await writer.wait_closed()
        assert json.loads((await reader.read(2**20)).partition(b"\r\n\r\n")[2].split(b"\r\n")[1])["type"] == "ADDED"


@pytest.mark.parametrize("depth", [100, 500, 900, 2000])
async def test_a_deep_object_is_taken_or_refused_but_breaks_nothing(api: Api, depth: int) -> None:
    text = '{"metadata": {"name": "o"}, "spec": {"model": {"source": "file:///m"}, "template": '
    nested = '{"a":' * depth + "1" + "}" * depth
    for answer in (
        await api.post(LLMDS, f"{text}{nested}}}}}"),
        await api.apply(f"{LLMDS}/o", f"{text}{nested}}}}}", force="true"),
    ):
        assert answer.status in (200, 201, 400), answer.body
    assert (await api.get(LLMDS)).status == 200
    (await api.post(LLMDS, llmd("p"))).ok()
