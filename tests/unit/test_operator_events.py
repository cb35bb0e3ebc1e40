"""Events: each said once, none of them a reason to stop."""

from typing import Any

import pytest

from pagefleet_operator import events
from pagefleet_operator.errors import ApiError
from pagefleet_operator.events import EventRecorder
from support.operator_objects import llmd


class Posts:
    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.failure: ApiError | None = None

    async def create(self, _resource: Any, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        assert body["metadata"]["namespace"] == namespace
        self.bodies.append(body)
        return body


async def test_the_same_is_said_once_in_ten_minutes_and_of_each_object() -> None:
    api, now = Posts(), 1_800_000_000.0
    recorder = EventRecorder(api, lambda: now)  # type: ignore[arg-type]
    for _ in range(5):
        await recorder.record(llmd(), reason="ScaledUp", message="from 1 to 2")
        now += 100
    assert len(api.bodies) == 1
    await recorder.record(llmd(), reason="ScaledUp", message="from 2 to 3")
    await recorder.record(llmd(name="other", uid="2"), reason="ScaledUp", message="from 1 to 2")
    now += events.REPEAT_SECONDS
    await recorder.record(llmd(), reason="ScaledUp", message="from 1 to 2", warning=True)
    assert [body["type"] for body in api.bodies] == ["Normal", "Normal", "Normal", "Warning"]
    assert len({body["metadata"]["name"] for body in api.bodies}) == 4
    assert {body["involvedObject"]["name"] for body in api.bodies} == {"chat", "other"}


@pytest.mark.parametrize("status", [0, 403, 404, 409, 422, 429, 500])
async def test_an_event_that_cannot_be_written_is_nobodys_trouble(status: int) -> None:
    api = Posts()
    api.failure = ApiError(status=status, reason="No", message="not now")
    await EventRecorder(api, lambda: 0.0).record(llmd(), reason="X", message="y")  # type: ignore[arg-type]


async def test_memory_and_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_REMEMBERED", 8)
    api = Posts()
    recorder = EventRecorder(api, lambda: 0.0)  # type: ignore[arg-type]
    for number in range(20):
        await recorder.record(llmd(), reason="X", message=f"{number} " + "long " * 1000)
    assert len(recorder._said) == 8
    assert all(len(body["message"]) <= events.MAX_MESSAGE for body in api.bodies)
