"""Who may take the lease, and what a leader may still do."""

import asyncio
from typing import Any

import pytest

from pagefleet_operator.errors import ApiError
from pagefleet_operator.lease import LeaseHolder, Sighting, may_take, sight
from pagefleet_operator.settings import LeaseSettings


class QuickRetries(LeaseSettings):
    @property
    def retry_seconds(self) -> float:
        return 0.001


SETTINGS = QuickRetries()


def lease(holder: str, version: str = "1", seconds: int = 15) -> dict[str, Any]:
    return {
        "metadata": {"resourceVersion": version},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": seconds},
    }


def test_a_lease_is_judged_by_how_long_we_saw_it_unchanged() -> None:
    first = sight(lease("other"), None, 100.0)
    assert not may_take(first, "me", 114.9)
    assert may_take(sight(lease("other"), first, 114.0), "me", 115.0)
    renewed = sight(lease("other", version="2"), first, 114.0)
    assert not may_take(renewed, "me", 115.0)


def test_a_leader_gives_up_well_before_another_may_begin() -> None:
    for seconds in (3, 15, 300):
        made = LeaseSettings(duration_seconds=seconds)
        assert made.renew_deadline_seconds + made.write_timeout_seconds < made.duration_seconds
        assert made.retry_seconds * 2 < made.renew_deadline_seconds
    assert (LeaseSettings().renew_deadline_seconds, LeaseSettings().write_timeout_seconds) == (8.0, 5.0)


def test_a_released_lease_and_our_own_are_free() -> None:
    assert may_take(Sighting("1", "", 15.0, 0.0), "me", 0.0)
    assert may_take(Sighting("1", "me", 15.0, 0.0), "me", 0.0)


class MemoryApi:
    """Holds one Lease with optimistic locking, as the API does."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.broken = False
        self.loses_answers = False
        """Writes happen, and their answers are lost."""

    def _fail(self) -> None:
        if self.broken:
            raise ApiError(status=0, reason="Unreachable", message="no route")

    async def get(self, _resource: Any, _namespace: str, _name: str) -> dict[str, Any] | None:
        self._fail()
        return self.lease

    async def create(self, _resource: Any, _namespace: str, body: dict[str, Any], *, fenced: bool) -> dict[str, Any]:
        self._fail()
        if self.lease is not None:
            raise ApiError(status=409, reason="AlreadyExists", message="exists")
        return self._store(body)

    async def replace(
        self, _resource: Any, _namespace: str, _name: str, body: dict[str, Any], *, fenced: bool
    ) -> dict[str, Any]:
        self._fail()
        if self.lease is None:
            raise ApiError(status=404, reason="NotFound", message="gone")
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(status=409, reason="Conflict", message="modified")
        return self._store(body)

    def _store(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        if self.loses_answers:
            raise ApiError(status=0, reason="Unreachable", message="Server disconnected")
        return self.lease


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def holder(api: MemoryApi, name: str, time: Time) -> LeaseHolder:
    return LeaseHolder(api, "default", name, SETTINGS, monotonic=time)  # type: ignore[arg-type]


async def test_the_first_one_holds_and_the_second_waits_until_it_is_released() -> None:
    api, time = MemoryApi(), Time()
    first, second = holder(api, "first", time), holder(api, "second", time)
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await asyncio.sleep(0.01)
    assert (first.is_held, second.is_held, waiting.done()) == (True, False, False)
    await first.release()
    async with asyncio.timeout(60):
        await waiting
    assert (first.is_held, second.is_held) == (False, True)
    assert api.lease is not None
    assert api.lease["spec"]["leaseTransitions"] == 1


async def test_a_silent_leader_is_followed_after_the_duration() -> None:
    api, time = MemoryApi(), Time()
    await holder(api, "dead", time).acquire()
    next_one = holder(api, "next", time)
    waiting = asyncio.create_task(next_one.acquire())
    await asyncio.sleep(0.01)
    time.now = 14.0
    await asyncio.sleep(0.01)
    assert not waiting.done()
    time.now = 15.5
    async with asyncio.timeout(60):
        await waiting


async def test_a_leader_that_slept_too_long_may_write_nothing_and_ends() -> None:
    """What SIGSTOP does to it: the monotonic clock went on."""
    api, time = MemoryApi(), Time()
    leader = holder(api, "leader", time)
    await leader.acquire()
    time.now = 8.0
    assert not leader.is_held
    async with asyncio.timeout(60):
        assert await leader.hold() == "it was not renewed in time"


async def test_a_lease_taken_by_another_ends_the_leader() -> None:
    api, time = MemoryApi(), Time()
    leader = holder(api, "leader", time)
    await leader.acquire()
    assert api.lease is not None
    api._store({**api.lease, "spec": {**api.lease["spec"], "holderIdentity": "other"}})
    async with asyncio.timeout(60):
        assert "someone else changed it" in await leader.hold()


async def test_a_lease_that_was_deleted_ends_the_leader() -> None:
    api, time = MemoryApi(), Time()
    leader = holder(api, "leader", time)
    await leader.acquire()
    api.lease = None
    async with asyncio.timeout(60):
        assert "someone else changed it" in await leader.hold()


async def test_a_renewal_whose_answer_was_lost_ends_nobody() -> None:
    """An API server that restarted had written the renewal: the next one was refused, and the leader ended."""
    api, time = MemoryApi(), Time()
    leader = holder(api, "leader", time)
    await leader.acquire()
    holding = asyncio.create_task(leader.hold())
    api.loses_answers = True
    time.now = 5.0
    await asyncio.sleep(0.03)
    assert not holding.done()
    assert api.version > 1, "it was written"
    api.loses_answers = False
    await asyncio.sleep(0.03)
    time.now = 12.0
    assert leader.is_held, "renewed at 5"
    assert not holding.done()
    api.loses_answers = True
    time.now = 14.0
    async with asyncio.timeout(60):
        assert await holding == "it was not renewed in time", "answers that never come are no renewals"


async def test_an_api_outage_shorter_than_the_deadline_is_survived() -> None:
    api, time = MemoryApi(), Time()
    leader = holder(api, "leader", time)
    await leader.acquire()
    holding = asyncio.create_task(leader.hold())
    api.broken = True
    time.now = 7.0
    await asyncio.sleep(0.02)
    assert not holding.done()
    api.broken = False
    await asyncio.sleep(0.02)
    time.now = 14.0
    assert leader.is_held, "renewed at 7"
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding


async def test_a_lost_lease_is_not_released() -> None:
    api, time = MemoryApi(), Time()
    leader = holder(api, "leader", time)
    await leader.acquire()
    time.now = 9.0
    await leader.release()
    assert api.lease is not None
    assert api.lease["spec"]["holderIdentity"] == "leader"


@pytest.mark.parametrize("status", [403, 404])
async def test_a_namespace_that_is_gone_is_skipped_until_it_is_back(status: int) -> None:
    api = MemoryApi()
    gone = ApiError(status=status, reason="NotFound", message="namespaces team not found")
    create = api.create

    async def refuse(*_: Any, **__: Any) -> dict[str, Any]:
        raise gone

    api.create = refuse  # type: ignore[method-assign]
    holder = LeaseHolder(api, "team", "me", SETTINGS)  # type: ignore[arg-type]
    assert not await holder.acquire(may_skip=True)
    assert not holder.is_held
    back = asyncio.create_task(holder.come_back())
    await asyncio.sleep(0.01)
    assert not back.done()
    api.create = create  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        assert "team" in await back


async def test_an_api_that_is_away_is_no_reason_to_skip_a_namespace() -> None:
    api = MemoryApi()
    api.broken = True
    holder = LeaseHolder(api, "team", "me", SETTINGS)  # type: ignore[arg-type]
    acquiring = asyncio.create_task(holder.acquire(may_skip=True))
    await asyncio.sleep(0.01)
    assert not acquiring.done()
    api.broken = False
    async with asyncio.timeout(60):
        assert await acquiring
