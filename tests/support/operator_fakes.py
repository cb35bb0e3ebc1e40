"""An API and a context for the operator's loops, without a cluster."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pagefleet_operator.client import Listed
from pagefleet_operator.errors import ApiError
from pagefleet_operator.events import EventRecorder
from pagefleet_operator.manager import Manager
from pagefleet_operator.pacing import Pace
from pagefleet_operator.reconcile import Context
from pagefleet_operator.scrape import Scraper
from pagefleet_operator.settings import OperatorSettings, ReconcileSettings
from pagefleet_operator.sharing import Shares
from pagefleet_operator.specs import Specs
from pagefleet_operator.store import Store
from pagefleet_operator.telemetry import Telemetry
from pagefleet_operator.write_budget import WriteBudget
from support.operator_objects import llmd_body

SETTINGS = OperatorSettings(
    namespaces=("default",),
    reconcile=ReconcileSettings(min_backoff_seconds=0.01, max_backoff_seconds=0.02, kinds_seconds=0.01),
)
"""Short pauses."""


class Time:
    now = 1000.0


time = Time()
"""What the clock of `running_manager` shows."""


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


def context_of(api: Any, store: Store, clock: Callable[[], float], settings: OperatorSettings = SETTINGS) -> Context:
    """What all loops share, around `api` and `store`."""
    telemetry = Telemetry()
    return Context(
        api=api,
        store=store,
        scraper=Scraper(settings.scrape, clock=clock, telemetry=telemetry),
        recorder=EventRecorder(api, clock),
        settings=settings,
        clock=clock,
        telemetry=telemetry,
        shares=Shares({}, store, Specs()),
        specs=Specs(),
        pace=Pace(settings.reconcile.status_writes_per_second),
        budget=WriteBudget(settings.reconcile.writes_per_second),
    )


@asynccontextmanager
async def running_manager() -> AsyncIterator[tuple[Manager, FakeApi, Store]]:
    """A started manager, its API and its store; its clock is `time`, set to 1000."""
    time.now = 1000.0
    api, store = FakeApi(), Store()
    manager = Manager(context_of(api, store, lambda: time.now))
    await manager.start()
    yield manager, api, store
    await manager.stop()


async def until(check: Any) -> None:
    for _ in range(1000):
        if check():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come true")
