"""The manager: dead watches are noticed, a crashed loop comes back, one object's failure is its own."""

import asyncio
import copy
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from pagefleet_operator import manager as manager_module
from pagefleet_operator.client import Listed
from pagefleet_operator.errors import ApiError
from pagefleet_operator.manager import Manager
from pagefleet_operator.names import ObjectKey
from pagefleet_operator.observe import Listing
from pagefleet_operator.settings import ReconcileSettings
from pagefleet_operator.store import LLMDEPLOYMENT, POD, Store
from support.operator_fakes import SETTINGS, FakeApi, context_of, running_manager, time, until
from support.operator_objects import llmd_body, pod_body

KEY = ObjectKey("default", "chat")
EARLY = replace(SETTINGS.reconcile, first_resyncs_seconds=(0.01, 0.01))


@pytest_asyncio.fixture
async def running() -> AsyncIterator[tuple[Manager, FakeApi, Store]]:
    async with running_manager() as everything:
        yield everything


async def test_an_event_makes_the_children(running: tuple[Manager, FakeApi, Store]) -> None:
    manager, api, _ = running
    manager.watched(LLMDEPLOYMENT, "ADDED", llmd_body())
    await until(lambda: len(api.applied) == 4 and api.statuses)
    assert api.applied == ["ServiceAccount chat", "Service chat", "PodDisruptionBudget chat", "Deployment chat"]


async def test_events_before_everything_was_listed_start_nothing() -> None:
    api, store = FakeApi(), Store()
    manager = Manager(context_of(api, store, lambda: 0.0))
    body = llmd_body()

    async def one(resource: Any, *_: Any, **__: Any) -> Listed:
        return Listed([body] if resource.plural == "llmdeployments" else [], "5")

    api.list = one  # type: ignore[method-assign]
    manager.watched(LLMDEPLOYMENT, None, body)
    await asyncio.sleep(0.02)
    assert api.applied == []
    await manager.start()
    await until(lambda: len(api.applied) == 4)
    await manager.stop()


async def test_a_failing_object_is_tried_again_and_the_others_go_on(running: tuple[Manager, FakeApi, Store]) -> None:
    manager, api, _ = running
    api.failures["bad"] = ApiError(status=500, reason="InternalError", message="etcd")
    manager.watched(LLMDEPLOYMENT, "ADDED", llmd_body("bad", uid="b"))
    manager.watched(LLMDEPLOYMENT, "ADDED", llmd_body("good", uid="g"))
    await until(lambda: "Deployment good" in api.applied)
    await until(lambda: "bad" in api.statuses)  # after some failures the status speaks of them
    del api.failures["bad"]
    time.now += 31.0  # the longest back-off
    manager.mark(ObjectKey("default", "bad"))
    await until(lambda: "Deployment bad" in api.applied)


async def test_what_ended_before_the_watches_began_is_forgotten_soon(
    running: tuple[Manager, FakeApi, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that was deleted between our first list and the watches' own stood in the status for two minutes."""
    monkeypatch.setattr(manager_module, "WATCH_GRACE_SECONDS", 0.0)
    first, api, _ = running
    store = Store()
    again = Manager(replace(first._context, store=store, settings=replace(SETTINGS, reconcile=EARLY)))

    async def listed(*_: Any, **__: Any) -> Listed:
        return Listed([], "500")

    await again.start()
    store.put(POD, pod_body("a", resource_version="400"))
    api.list = listed  # type: ignore[method-assign]
    await until(lambda: store.get(POD, ObjectKey("default", "a")) is None)
    await again.stop()


async def test_the_echo_of_an_own_write_is_no_reason_to_look_again(running: tuple[Manager, FakeApi, Store]) -> None:
    """With a watch event for each of the operator's own writes, every change was reconciled twice."""
    manager, api, store = running
    manager.watched(LLMDEPLOYMENT, "ADDED", llmd_body())
    await until(lambda: len(api.applied) == 4 and api.statuses)
    loop = manager._loops[KEY]
    await until(lambda: loop.dirty_since is None)
    for kind in (LLMDEPLOYMENT, "Service", "Deployment"):
        written = store.get(kind, KEY)
        assert written is not None
        manager.watched(kind, "MODIFIED", copy.deepcopy(dict(written)))
        assert loop.dirty_since is None
    edited = copy.deepcopy(dict(store.get("Service", KEY) or {}))
    edited["metadata"]["resourceVersion"] = "9000"
    manager.watched("Service", "MODIFIED", edited)
    assert loop.dirty_since is not None


async def test_a_loop_that_crashed_is_started_again(running: tuple[Manager, FakeApi, Store], caplog: Any) -> None:
    """A fault of our own in one object must not stop the operator, nor that object for good."""
    manager, api, _ = running
    api.failures["chat"] = RuntimeError("a fault of our own")
    manager.watched(LLMDEPLOYMENT, "ADDED", llmd_body())
    await until(lambda: "failed unexpectedly" in caplog.text)
    del api.failures["chat"]
    await until(lambda: "Deployment chat" in api.applied)


async def test_a_deleted_object_ends_its_loop(running: tuple[Manager, FakeApi, Store]) -> None:
    manager, api, _ = running
    manager.watched(LLMDEPLOYMENT, "ADDED", llmd_body())
    await until(lambda: len(api.applied) == 4 and api.statuses)
    gone = llmd_body()
    gone["metadata"]["resourceVersion"] = "9999"
    manager.watched(LLMDEPLOYMENT, "DELETED", gone)
    await until(lambda: manager.num_loops == 0)


async def test_watches_that_miss_changes_twice_running_are_reported_dead(
    running: tuple[Manager, FakeApi, Store], monkeypatch: Any
) -> None:
    manager, _, store = running
    monkeypatch.setattr("pagefleet_operator.manager.WATCH_GRACE_SECONDS", 0.01)

    def listing(name: str) -> Listing:
        body = llmd_body(name, uid=name)
        body["metadata"]["resourceVersion"] = "50"
        return Listing("default", {LLMDEPLOYMENT: Listed([body], "60")})

    await manager.resync([listing("first")])
    assert store.get(LLMDEPLOYMENT, ObjectKey("default", "first")) is not None, "healed"
    assert manager.watch_problem() is None, "once may be a coincidence"
    await manager.resync([listing("second")])
    assert manager.watch_problem() is not None
    await manager.resync([listing("second")])
    assert manager.watch_problem() is None, "nothing was missed any more"


async def test_an_event_on_its_way_is_not_missed(running: tuple[Manager, FakeApi, Store], monkeypatch: Any) -> None:
    manager, _, _ = running
    monkeypatch.setattr("pagefleet_operator.manager.WATCH_GRACE_SECONDS", 0.05)
    body = llmd_body("late", uid="late")
    body["metadata"]["resourceVersion"] = "50"
    resyncing = asyncio.create_task(manager.resync([Listing("default", {LLMDEPLOYMENT: Listed([body], "60")})]))
    await asyncio.sleep(0.01)
    manager.watched(LLMDEPLOYMENT, "ADDED", body)
    await resyncing
    await manager.resync([])
    assert manager.watch_problem() is None


async def test_a_change_that_waits_too_long_is_unhealthy() -> None:
    api = FakeApi()
    now = 0.0
    one_at_a_time = replace(SETTINGS, reconcile=ReconcileSettings(concurrency=1))
    manager = Manager(context_of(api, Store(), lambda: now, one_at_a_time))
    await manager.start()
    hanging = asyncio.Event()

    async def hang(*_: Any) -> dict[str, Any]:
        await hanging.wait()
        return {}

    api.apply = hang  # type: ignore[method-assign,assignment]
    manager.watched(LLMDEPLOYMENT, "ADDED", llmd_body("one", uid="1"))
    manager.watched(LLMDEPLOYMENT, "ADDED", llmd_body("two", uid="2"))
    await asyncio.sleep(0.02)
    assert manager.reconcile_problem() is None
    now = 200.0
    assert manager.reconcile_problem() == "a change has waited 200 s"
    await manager.stop()


async def test_an_api_server_that_was_set_back_is_taken_at_its_word(running: tuple[Manager, FakeApi, Store]) -> None:
    """A restored backup has lower versions: they must not be mistaken for old news for ever."""
    manager, api, store = running
    newer = llmd_body()
    newer["metadata"]["resourceVersion"] = "5000"
    manager.watched(LLMDEPLOYMENT, "ADDED", newer)
    restored = llmd_body()
    restored["metadata"]["resourceVersion"] = "40"

    async def set_back(resource: Any, *_: Any, **__: Any) -> Listed:
        return Listed([restored] if resource.plural == "llmdeployments" else [], "45")

    api.list = set_back  # type: ignore[method-assign]
    await manager.resync(await manager._list())
    found = store.get(LLMDEPLOYMENT, KEY)
    assert found is not None
    assert found["metadata"]["resourceVersion"] == "40"
