"""Bare pods on a local cluster, and what becomes of them."""

from pagefleet_localcluster.client import PODS, ApiError, Client
from pagefleet_localcluster.objects import Object
from support.local_cluster import eventually


def pod(name: str, *containers: Object, **spec: object) -> Object:
    return {
        "metadata": {"name": name},
        "spec": {"terminationGracePeriodSeconds": 2, "containers": list(containers), **spec},
    }


def shell(name: str, script: str, **fields: object) -> Object:
    return {"name": name, "image": "busybox", "command": ["sh", "-c", script], **fields}


async def reached(client: Client, name: str, phase: str) -> Object:
    async def probe() -> Object | None:
        now = await client.get(PODS, name, "default")
        return now if now["status"].get("phase") == phase else None

    return await eventually(probe)


async def gone(client: Client, name: str) -> None:
    async def probe() -> bool:
        try:
            await client.get(PODS, name, "default")
        except ApiError as error:
            return error.code == 404
        return False

    await eventually(probe)
