"""Children: written together, each for itself; what is refused is said and tried at a slow pace."""

import asyncio
import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from pagefleet_operator.client import Listed
from pagefleet_operator.errors import ApiError
from pagefleet_operator.manager import Manager
from pagefleet_operator.names import ObjectKey
from pagefleet_operator.store import LLMDEPLOYMENT, Store
from support.operator_fakes import FakeApi, running_manager, time, until
from support.operator_objects import llmd_body

KEY = ObjectKey("default", "chat")


@pytest_asyncio.fixture
async def running() -> AsyncIterator[tuple[Manager, FakeApi, Store]]:
    async with running_manager() as everything:
        yield everything


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
