"""The client and its reflector against the embedded API: resume, list again on 410, see own writes at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from pagefleet_localcluster.client import CONFIG_MAPS, ApiError, Client, Resource
from pagefleet_localcluster.kubeconfig import Kubeconfig, KubeconfigError
from pagefleet_localcluster.objects import Object
from pagefleet_localcluster.reflector import Reflector
from support.local_cluster import eventually, running_cluster


def config_map(name: str, **data: str) -> Object:
    return {"metadata": {"name": name}, "data": data}


@asynccontextmanager
async def reflected(client: Client, log: list[tuple[str, str]]) -> AsyncIterator[Reflector]:
    reflector = Reflector(client, CONFIG_MAPS, {"labelSelector": "!kubernetes.io/ignored"})

    def listen(old: Object | None, new: Object | None) -> None:
        kind = "added" if old is None else "deleted" if new is None else "changed"
        obj = new if new is not None else old
        assert obj is not None
        if obj["metadata"]["namespace"] == "default" and not obj["metadata"]["name"].startswith("kube-"):
            log.append((kind, obj["metadata"]["name"]))

    reflector.listeners.append(listen)
    task = asyncio.create_task(reflector.run())
    try:
        await reflector.synced.wait()
        yield reflector
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_changes_arrive_in_order(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, nodes=0) as cluster:
        client, log = cluster.client, list[tuple[str, str]]()
        await client.create(CONFIG_MAPS, config_map("a"), "default")
        async with reflected(client, log) as reflector:
            await client.create(CONFIG_MAPS, config_map("b"), "default")
            await client.patch(CONFIG_MAPS, "a", {"data": {"k": "v"}}, "default")
            await client.delete(CONFIG_MAPS, "b", "default")
            want = [("added", "a"), ("added", "b"), ("changed", "a"), ("deleted", "b")]

            async def arrived() -> bool:
                return log == want

            await eventually(arrived)
            assert reflector.objects["default/a"]["data"] == {"k": "v"}
            assert "managedFields" not in reflector.objects["default/a"]["metadata"]


async def test_own_writes_are_seen_at_once_and_only_once(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, nodes=0) as cluster:
        client, log = cluster.client, list[tuple[str, str]]()
        async with reflected(client, log) as reflector:
            created = await client.create(CONFIG_MAPS, config_map("a"), "default")
            reflector.record(created)
            assert "default/a" in reflector.objects
            later = await client.patch(CONFIG_MAPS, "a", {"data": {"k": "v"}}, "default")
            reflector.record(later)
            reflector.record(created)
            assert reflector.objects["default/a"]["data"] == {"k": "v"}
            await client.create(CONFIG_MAPS, config_map("z"), "default")

            async def arrived() -> bool:
                return ("added", "z") in log

            await eventually(arrived)
            assert log == [("added", "a"), ("changed", "a"), ("added", "z")]
            await client.delete(CONFIG_MAPS, "a", "default")

            async def gone() -> bool:
                return "default/a" not in reflector.objects

            await eventually(gone)
            reflector.record(later)
            assert "default/a" not in reflector.objects, "a write that was overtaken by a deletion must stay gone"


class Forgetful(Client):
    """Its watches fail by turns, as those of a server that forgets its history, restarts or breaks the stream."""

    def __init__(self, kubeconfig: Kubeconfig, faults: list[Exception]) -> None:
        super().__init__(kubeconfig)
        self.faults = faults
        self.lists = 0

    async def list(self, resource: Resource, namespace: str | None = None, **query: str) -> Object:
        self.lists += 1
        return await super().list(resource, namespace, **query)

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        resource_version: str,
        timeout_seconds: int = 300,
        **query: str,
    ) -> AsyncIterator[tuple[str, Object]]:
        if self.faults:
            raise self.faults.pop(0)
        async for event in super().watch(
            resource, namespace, resource_version=resource_version, timeout_seconds=timeout_seconds, **query
        ):
            yield event


async def test_failing_watches_resume_and_an_expired_version_is_listed_again(tmp_path: Path) -> None:
    """What was missed is told as differences; a broken stream alone needs no new list."""
    async with running_cluster(tmp_path, nodes=0) as cluster:
        await cluster.client.create(CONFIG_MAPS, config_map("a"), "default")
        faults: list[Exception] = [
            aiohttp.ClientPayloadError("cut"),
            ApiError(500, "InternalError", "x"),
            ApiError(410, "Expired", "too old resource version"),
        ]
        log: list[tuple[str, str]] = []
        async with (
            Forgetful(Kubeconfig.load(cluster.kubeconfig_path), faults) as client,
            reflected(client, log) as reflector,
        ):
            ghost = {"name": "ghost", "namespace": "default", "uid": "u", "resourceVersion": "1"}
            reflector.objects["default/ghost"] = {"metadata": ghost}
            await cluster.client.create(CONFIG_MAPS, config_map("b"), "default")

            async def told() -> bool:
                return {("added", "b"), ("deleted", "ghost")} <= set(log)

            await eventually(told)
            assert client.lists == 2 and not faults
            assert sorted(log) == [("added", "a"), ("added", "b"), ("deleted", "ghost")]


async def test_refusals_carry_kubernetes_reason(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, nodes=0) as cluster:
        with pytest.raises(ApiError) as caught:
            await cluster.client.get(CONFIG_MAPS, "none", "default")
        assert (caught.value.code, caught.value.reason) == (404, "NotFound")
        assert caught.value.message == 'configmaps "none" not found'


def test_kubeconfig_survives_a_round_trip_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    Kubeconfig("http://127.0.0.1:1", token="secret", namespace="ns").write(path, name="local")
    assert Kubeconfig.load(path) == Kubeconfig("http://127.0.0.1:1", token="secret", namespace="ns")
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("{", "cannot read kubeconfig"),
        ("current-context: none\ncontexts: []", r"is incomplete: no 'contexts\[name=none\]'"),
        (
            "current-context: c\ncontexts: [{name: c, context: {cluster: k, user: u}}]\n"
            "clusters: [{name: k, cluster: {server: 'https://h'}}]\nusers: [{name: u, user: {exec: {}}}]",
            "'exec' is not supported",
        ),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_refused_with_the_reason(text: str, want: str, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(KubeconfigError, match=want):
        Kubeconfig.load(path)
