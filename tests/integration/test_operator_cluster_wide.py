"""One operator for all namespaces."""

import asyncio
from pathlib import Path

import pytest

from pagefleet_localcluster.client import DEPLOYMENTS, Resource
from support.operator_cluster import LLMDS, operator_cluster

NAMESPACES = Resource("v1", "namespaces", "Namespace", namespaced=False)


@pytest.mark.e2e
async def test_objects_of_every_namespace_are_served(tmp_path: Path) -> None:
    async with operator_cluster(tmp_path, "--all-namespaces") as cluster:
        await cluster.client.create(NAMESPACES, {"metadata": {"name": "team"}})
        await cluster.create({}, name="here")
        body = {"metadata": {"name": "there", "namespace": "team"}, "spec": {"model": {"source": "file:///m"}}}
        await cluster.client.create(LLMDS, body, "team")
        await cluster.condition("Available", "True", name="here")

        async def served() -> bool:
            status = (await cluster.client.get(LLMDS, "there", "team")).get("status", {})
            return bool(status.get("ready") == "1/1")

        await cluster.until(served, "the other namespace's object")
        deployment = await cluster.client.get(DEPLOYMENTS, "there", "team")
        assert deployment["status"]["readyReplicas"] == 1
        await cluster.client.patch(LLMDS, "there", {"spec": {"engine": {"image": "new:2"}}}, "team")
        await cluster.client.delete(NAMESPACES, "team")

        async def is_gone() -> bool:
            found = await cluster.client.list(NAMESPACES)
            return "team" not in {item["metadata"]["name"] for item in found["items"]}

        await cluster.until(is_gone, "a namespace goes in the middle of a rollout")
        await cluster.client.patch(LLMDS, "here", {"spec": {"replicas": 2}}, "default")

        async def followed() -> bool:
            return bool((await cluster.llmd("here"))["status"].get("ready") == "2/2")

        await cluster.until(followed, "the other namespace is still served")
        before = len(cluster.proxy.seen)
        await cluster.scraped("here", 2)  # time enough to ask
        assert not [seen for seen in cluster.proxy.seen[before:] if "/team/" in seen.path], (
            "nobody asks for it any more"
        )
        assert "unexpectedly" not in cluster.operator.log.read_text()


@pytest.mark.e2e
async def test_a_deleted_namespace_takes_no_other_one_with_it(tmp_path: Path) -> None:
    """The operator ended with the namespace's Lease, and the next one waited for that Lease for ever."""
    arguments = ("--namespace", "default", "--namespace", "team", "--lease-seconds", "3")
    async with operator_cluster(tmp_path, *arguments) as cluster:
        await cluster.create({}, name="here")  # team is not there yet
        await cluster.condition("Available", "True", name="here")
        await cluster.client.create(NAMESPACES, {"metadata": {"name": "team"}})
        assert cluster.operator.process is not None
        async with asyncio.timeout(90):
            assert await cluster.operator.process.wait() == 2, "it ends to serve what came"
        await cluster.operator.start()
        body = {"metadata": {"name": "there", "namespace": "team"}, "spec": {"model": {"source": "file:///m"}}}
        await cluster.client.create(LLMDS, body, "team")

        async def served() -> bool:
            status = (await cluster.client.get(LLMDS, "there", "team")).get("status", {})
            return bool(status.get("ready") == "1/1")

        await cluster.until(served, "the object in the namespace that came")
        await cluster.client.delete(NAMESPACES, "team")
        async with asyncio.timeout(90):
            assert await cluster.operator.process.wait() == 2, "it ends as its lease is gone"
        await cluster.operator.start()
        await cluster.client.patch(LLMDS, "here", {"spec": {"replicas": 2}}, "default")

        async def followed() -> bool:
            return bool((await cluster.llmd("here"))["status"].get("ready") == "2/2")

        await cluster.until(followed, "the other namespace is still served")
