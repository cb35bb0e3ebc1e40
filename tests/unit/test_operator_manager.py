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
from pagefleet_operator.events import EventRecorder
from pagefleet_operator.manager import Manager
from pagefleet_operator.names import ObjectKey
from pagefleet_operator.observe import Listing
from pagefleet_operator.reconcile import Context
from pagefleet_operator.scrape import Scraper
from pagefleet_operator.settings import OperatorSettings, ReconcileSettings
from pagefleet_operator.sharing import Shares
from pagefleet_operator.specs import Specs
from pagefleet_operator.store import LLMDEPLOYMENT, POD, Store
from pagefleet_operator.telemetry import Telemetry
from support.operator_objects import llmd_body, pod_body

KEY = ObjectKey("default", "chat")
SETTINGS = OperatorSettings(
    namespaces=("default",),
    reconcile=ReconcileSettings(min_backoff_seconds=0.01, max_backoff_seconds=0.02, kinds_seconds=0.01),
)
EARLY = replace(SETTINGS.reconcile, first_resyncs_seconds=(0.01, 0.01))


class Time:
    now = 1000.0


time = Time()
"""What the clock of `running` shows."""


class FakeApi:
    """Answers every write with what was written; fails as told."""

    def __init__(self) -> None:
        self.applied: list[str] = []
        self.statuses: list[str] = []
        self.failures: dict[str, Exception] = {}
        self.version = 100
        self.tries = 0
        self.has_pod_monitors = False
        self.deleted: list[str] = []
        self.refused_kinds: dict[str, ApiError] = {}
        self.said: list[str] = []

    async def get(self, *_: Any) -> None:
        return None

    async def list(self, *_: Any, **__: Any) -> Listed:
        return Listed([], "1")

    async def is_served(self, _resource: Any) -> bool:
        return self.has_pod_monitors

    async def delete(self, resource: Any, _namespace: str, name: str, *, uid: str, version: str) -> None:
        self.deleted.append(f"{resource.plural} {name} {uid}")

    async def create(self, _resource: Any, _namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        self.said.append(f"{body['reason']}: {body['message']}")
        return body

    async def apply(self, _resource: Any, manifest: dict[str, Any]) -> dict[str, Any]:
        name = manifest["metadata"]["name"]
        self.tries += 1
        if name in self.failures:
            raise self.failures[name]
        if manifest["kind"] in self.refused_kinds:
            raise self.refused_kinds[manifest["kind"]]
        self.applied.append(f"{manifest['kind']} {name}")
        self.version += 1
        metadata = {
            **manifest["metadata"],
            "uid": manifest["kind"],
            "resourceVersion": str(self.version),
            "generation": 1,
        }
        return {**manifest, "metadata": metadata}

    async def patch(
        self, _resource: Any, _namespace: str, name: str, body: dict[str, Any], *, subresource: str | None = None
    ) -> dict[str, Any]:
        self.statuses.append(name)
        self.version += 1
        made = llmd_body(name, status=body["status"])
        made["metadata"]["resourceVersion"] = str(self.version)
        return made


@pytest_asyncio.fixture
async def running() -> AsyncIterator[tuple[Manager, FakeApi, Store]]:
    api, store = FakeApi(), Store()
    telemetry = Telemetry()

    time.now = 1000.0

    def clock() -> float:
        return time.now

    context = Context(
        api=api,  # type: ignore[arg-type]
        store=store,
        scraper=Scraper(SETTINGS.scrape, clock=clock, telemetry=telemetry),
        recorder=EventRecorder(api, clock),  # type: ignore[arg-type]
        settings=SETTINGS,
        clock=clock,
        telemetry=telemetry,
        shares=Shares({}, Store(), Specs()),
        specs=Specs(),
    )
    manager = Manager(context)
    await manager.start()
    yield manager, api, store
    await manager.stop()


async def until(check: Any) -> None:
    for _ in range(1000):
        if check():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come true")


async def test_an_event_makes_the_children(running: tuple[Manager, FakeApi, Store]) -> None:
    manager, api, _ = running
    manager.watched(LLMDEPLOYMENT, "ADDED", llmd_body())
    await until(lambda: len(api.applied) == 4 and api.statuses)
    assert api.applied == ["ServiceAccount chat", "Service chat", "PodDisruptionBudget chat", "Deployment chat"]


async def test_pod_monitors_come_and_go_with_their_kind_and_with_the_wish(
    running: tuple[Manager, FakeApi, Store],
) -> None:
    manager, api, store = running
    manager.watched(LLMDEPLOYMENT, "ADDED", llmd_body())
    await until(lambda: len(api.applied) == 4)
    api.has_pod_monitors = True
    await until(lambda: api.applied[4:] == ["PodMonitor chat"])
    off = llmd_body(spec={"monitoring": {"podMonitor": "Disabled"}}, generation=2)
    off["metadata"]["resourceVersion"] = "900"
    manager.watched(LLMDEPLOYMENT, "MODIFIED", off)
    await until(lambda: api.deleted == ["podmonitors chat PodMonitor"])
    assert store.get("PodMonitor", KEY) is None
    on = llmd_body(generation=3)
    on["metadata"]["resourceVersion"] = "1900"
    manager.watched(LLMDEPLOYMENT, "MODIFIED", on)
    await until(lambda: api.applied[5:] == ["PodMonitor chat"])


async def test_a_role_without_pod_monitors_makes_none(running: tuple[Manager, FakeApi, Store]) -> None:
    _, api, store = running
    listed = api.list

    async def refuse(resource: Any, *args: Any, **kwargs: Any) -> Listed:
        if resource.plural == "podmonitors":
            api.tries += 1
            raise ApiError(status=403, reason="Forbidden", message="podmonitors is forbidden")
        return await listed(resource, *args, **kwargs)

    api.list = refuse  # type: ignore[method-assign]
    api.has_pod_monitors = True
    await until(lambda: api.tries >= 2)
    assert store.has_pod_monitors is False


async def test_events_before_everything_was_listed_start_nothing() -> None:
    api, store, telemetry = FakeApi(), Store(), Telemetry()
    context = Context(
        api=api,  # type: ignore[arg-type]
        store=store,
        scraper=Scraper(SETTINGS.scrape, telemetry=telemetry),
        recorder=EventRecorder(api, lambda: 0.0),  # type: ignore[arg-type]
        settings=SETTINGS,
        clock=lambda: 0.0,
        telemetry=telemetry,
        shares=Shares({}, Store(), Specs()),
        specs=Specs(),
    )
    manager = Manager(context)
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


async def test_what_the_api_refuses_is_not_sent_again_and_again(running: tuple[Manager, FakeApi, Store]) -> None:
    manager, api, _ = running
    api.failures["chat"] = ApiError(status=422, reason="Invalid", message="spec.x: bad")
    manager.watched(LLMDEPLOYMENT, "ADDED", llmd_body())
    await until(lambda: api.statuses)
    for _ in range(20):
        manager.mark(KEY)
        await asyncio.sleep(0.005)
    assert api.tries == 3, "each child once, and the Deployment not before them"
    del api.failures["chat"]
    changed = llmd_body(spec={"engine": {"maxNumSeqs": 4}}, generation=2)
    changed["metadata"]["resourceVersion"] = "8000"
    manager.watched(LLMDEPLOYMENT, "MODIFIED", changed)
    await until(lambda: "Deployment chat" in api.applied)


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


async def test_children_are_written_at_once_and_the_deployment_when_they_are_there(
    running: tuple[Manager, FakeApi, Store],
) -> None:
    manager, api, _ = running
    applied, together = api.apply, asyncio.Barrier(3)

    async def wait_for_the_others(resource: Any, manifest: dict[str, Any]) -> dict[str, Any]:
        if manifest["kind"] != "Deployment":
            await together.wait()
        return await applied(resource, manifest)

    api.apply = wait_for_the_others  # type: ignore[assignment,method-assign]
    manager.watched(LLMDEPLOYMENT, "ADDED", llmd_body())
    await until(lambda: len(api.applied) == 4)
    assert api.applied[3] == "Deployment chat"


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


async def test_a_refused_child_is_named_by_its_kind(running: tuple[Manager, FakeApi, Store]) -> None:
    manager, api, store = running
    api.refused_kinds["PersistentVolumeClaim"] = ApiError(status=422, reason="Invalid", message="spec is immutable")
    spec = {"model": {"source": "hf://acme/tiny", "cache": {"size": "1Gi"}}}
    manager.watched(LLMDEPLOYMENT, "ADDED", llmd_body(spec=spec))

    def reasons() -> list[str]:
        conditions = (store.get(LLMDEPLOYMENT, KEY) or {}).get("status", {}).get("conditions", [])
        return [item["reason"] for item in conditions if item["type"] == "Degraded"]

    await until(lambda: reasons() == ["ChildRefused"])


@pytest.mark.parametrize("refused", ["ServiceAccount", "Service", "PodDisruptionBudget", "Deployment"])
@pytest.mark.parametrize("status", [422, 403, 409, 500])
async def test_what_did_happen_is_said_and_goes_on_although_another_child_failed(
    running: tuple[Manager, FakeApi, Store], refused: str, status: int
) -> None:
    """The Event about a repair was lost, and the Deployment stood still, while any other child was refused."""
    manager, api, store = running
    manager.watched(LLMDEPLOYMENT, "ADDED", llmd_body())
    await until(lambda: len(api.applied) == 4 and api.statuses)
    api.refused_kinds[refused] = ApiError(status=status, reason="Refused", message="not this one")
    repaired = "Service" if refused == "Deployment" else "Deployment"
    for number, kind in enumerate((refused, repaired)):
        edited = copy.deepcopy(dict(store.get(kind, KEY) or {}))
        edited["metadata"] |= {"resourceVersion": str(5000 + number), "labels": {}}
        store.put(kind, edited)
    manager.mark(KEY)
    await until(lambda: f"{repaired} chat" in api.applied[4:])
    await until(lambda: any(said.startswith(f"DriftRepaired: {repaired} chat") for said in api.said))
    assert not any(said.startswith(f"DriftRepaired: {refused} chat") for said in api.said)
    del api.refused_kinds[refused]
    time.now += 31.0  # the longest back-off
    manager.mark(KEY)
    await until(lambda: any(said.startswith(f"DriftRepaired: {refused} chat") for said in api.said))


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
    api, telemetry = FakeApi(), Telemetry()
    now = 0.0
    context = Context(
        api=api,  # type: ignore[arg-type]
        store=Store(),
        scraper=Scraper(SETTINGS.scrape, telemetry=telemetry),
        recorder=EventRecorder(api, lambda: now),  # type: ignore[arg-type]
        settings=replace(SETTINGS, reconcile=ReconcileSettings(concurrency=1)),
        clock=lambda: now,
        telemetry=telemetry,
        shares=Shares({}, Store(), Specs()),
        specs=Specs(),
    )
    manager = Manager(context)
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
