"""One operator for all namespaces."""

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
