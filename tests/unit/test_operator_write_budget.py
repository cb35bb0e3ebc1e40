"""How often numbers are written: objects take turns, so that an API server never sees a burst; what people wait for is
written at once."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from pagefleet_operator.names import ObjectKey
from pagefleet_operator.pacing import Pace
from pagefleet_operator.reconcile import ObjectLoop
from pagefleet_operator.settings import OperatorSettings, ReconcileSettings
from pagefleet_operator.store import LLMDEPLOYMENT, POD, REPLICA_SET, Store
from support.operator_fakes import context_of
from support.operator_objects import llmd_body, pod_body, replica_set_body, sample

RATE = ReconcileSettings().status_writes_per_second


class KeepingApi:
    """Takes every write and merges statuses, as an API server does."""

    def __init__(self) -> None:
        self.version = 1000
        self.status: dict[str, dict[str, Any]] = {}
        self.written: Counter[str] = Counter()

    async def get(self, *_: Any) -> None:
        return None

    async def create(self, _resource: Any, _namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        return body

    async def apply(self, _resource: Any, manifest: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        return {**manifest, "metadata": {**manifest["metadata"], "uid": "c", "resourceVersion": str(self.version)}}

    async def patch(self, _resource: Any, _namespace: str, name: str, body: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.version += 1
        self.written[name] += 1
        merged = {**self.status.get(name, {}), **body["status"]}
        self.status[name] = {key: value for key, value in merged.items() if value is not None}
        made = llmd_body(name, uid=name, status=self.status[name])
        made["metadata"]["resourceVersion"] = str(self.version)
        return made


@pytest.mark.parametrize("count", [1, 40, 200])
async def test_all_objects_together_write_their_numbers_evenly_and_within_the_budget(count: int) -> None:
    now = 1_800_000_000.0
    api, store = KeepingApi(), Store()
    context = context_of(api, store, lambda: now, OperatorSettings(namespaces=("default",)))
    names = [f"m{number}" for number in range(count)]
    loops = {name: ObjectLoop(ObjectKey("default", name), context, asyncio.Semaphore(1)) for name in names}
    for name in names:
        store.put(LLMDEPLOYMENT, llmd_body(name, uid=name))
        store.put(REPLICA_SET, replica_set_body(name))
        store.put(POD, pod_body(f"{name}-pod", owner=name))

    async def step(used: int) -> int:
        """Every object is looked at under another load; how many were written."""
        before = api.written.total()
        context.scraper.rounds += 1
        context.scraper._samples = {f"uid-{name}-pod": sample(used=used, time=now) for name in names}
        for name, loop in loops.items():
            body = store.get(LLMDEPLOYMENT, ObjectKey("default", name))
            assert body is not None
            await loop.step(body)
        return api.written.total() - before

    async def seconds(number: int) -> list[int]:
        nonlocal now
        writes = []
        for tick in range(number):
            now += 1
            writes.append(await step(10 + 50 * (tick % 2) + tick % 7))
        return writes

    assert await step(1) == count, "the first status is written at once"
    now += 60
    assert await step(1) == 0, "nothing at rest"
    api.written.clear()
    writes = await seconds(20)
    assert max(writes) <= RATE + 1, "however many change at once"
    assert sum(writes) >= min(RATE, count / 3) * 18, "the budget is used"
    assert min(api.written[name] for name in names) >= min(20 / 3, 20 * RATE / count) - 1, "each in its turn"
    now += 1
    store.put(POD, pod_body("b", owner="m0", ready=False, waiting=("ImagePullBackOff", "no such image")))
    api.written.clear()
    await step(10)
    assert api.written["m0"] == 1, "a condition does not wait for its turn"


def test_turns_are_evenly_spaced_and_none_is_kept_for_later() -> None:
    pace = Pace(4)
    assert [pace.next_turn(10.0) for _ in range(3)] == [10.0, 10.25, 10.5]
    assert pace.next_turn(60.0) == 60.0, "a pause is no credit"
    assert pace.next_turn(60.0) == 60.25
