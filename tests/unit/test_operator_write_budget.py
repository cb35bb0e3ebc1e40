"""How often numbers are written: the more objects, the longer each waits; what people wait for is written at once."""

import asyncio
from typing import Any

import pytest

from pagefleet_operator.names import ObjectKey
from pagefleet_operator.reconcile import ObjectLoop
from pagefleet_operator.settings import OperatorSettings
from pagefleet_operator.store import LLMDEPLOYMENT, POD, REPLICA_SET, Store
from support.operator_fakes import context_of
from support.operator_objects import llmd_body, pod_body, replica_set_body, sample

KEY = ObjectKey("default", "m0")
SECONDS = 120


class KeepingApi:
    """Takes every write and merges statuses, as an API server does."""

    def __init__(self) -> None:
        self.version = 1000
        self.status: dict[str, Any] = {}
        self.writes: list[dict[str, Any]] = []

    async def get(self, *_: Any) -> None:
        return None

    async def create(self, _resource: Any, _namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        return body

    async def apply(self, _resource: Any, manifest: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        return {**manifest, "metadata": {**manifest["metadata"], "uid": "c", "resourceVersion": str(self.version)}}

    async def patch(self, _resource: Any, _namespace: str, name: str, body: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.version += 1
        self.writes.append(body["status"])
        self.status = {key: value for key, value in {**self.status, **body["status"]}.items() if value is not None}
        made = llmd_body(name, status=self.status)
        made["metadata"]["resourceVersion"] = str(self.version)
        return made


@pytest.mark.parametrize(("objects", "most"), [(1, SECONDS // 2), (100, SECONDS // 2), (1000, SECONDS // 20)])
async def test_all_objects_together_write_their_numbers_fifty_times_a_second_at_most(objects: int, most: int) -> None:
    now = 1_800_000_000.0
    api, store = KeepingApi(), Store()
    context = context_of(api, store, lambda: now, OperatorSettings(namespaces=("default",)))
    scraper = context.scraper
    for number in range(objects):
        store.put(LLMDEPLOYMENT, llmd_body(f"m{number}", uid=f"uid-{number}" if number else "uid-1"))
    store.put(REPLICA_SET, replica_set_body("m0"))
    store.put(POD, pod_body("a", owner="m0"))
    loop = ObjectLoop(KEY, context, asyncio.Semaphore(1))

    async def step(used: int) -> None:
        scraper.rounds += 1
        scraper._samples = {"uid-a": sample(used=used, time=now)}
        body = store.get(LLMDEPLOYMENT, KEY)
        assert body is not None
        await loop.step(body)

    await step(1)
    now += 60
    api.writes.clear()
    for tick in range(SECONDS):  # the load is another one every second
        now += 1
        await step(10 + 50 * (tick % 2) + tick % 7)
    assert 0 < len(api.writes) <= most + 1
    assert objects * len(api.writes) / SECONDS <= 50 + objects / SECONDS
    api.writes.clear()
    now += 1
    store.put(POD, pod_body("b", owner="m0", ready=False, waiting=("ImagePullBackOff", "no such image")))
    await step(10)
    assert len(api.writes) == 1, "a condition does not wait for its turn"
