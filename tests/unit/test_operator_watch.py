"""kopf only carries events: it compares nothing, copies nothing and keeps nothing."""

from typing import Any

import kopf

from pagefleet_operator.store import LLMDEPLOYMENT
from pagefleet_operator.watch import WATCHED_CHILDREN, NoDiffs, build_registry, configure_kopf
from support.operator_objects import llmd_body


class Seen:
    def __init__(self) -> None:
        self.events: list[tuple[str, str | None, Any]] = []

    def watched(self, kind: str, event_type: str | None, body: Any) -> None:
        self.events.append((kind, event_type, body))


async def test_every_event_is_handed_over_as_it_was_decoded() -> None:
    """A copy of each event's body was a seventh of the operator's work in a burst."""
    seen = Seen()
    registry = build_registry(seen)  # type: ignore[arg-type]
    handlers = registry._watching.get_all_handlers()
    body = llmd_body()
    for handler in handlers:
        on_event: Any = handler.fn
        await on_event(event={"type": "MODIFIED", "object": body})
    assert [(kind, event_type) for kind, event_type, _ in seen.events] == [
        (kind, "MODIFIED") for kind in (LLMDEPLOYMENT, *WATCHED_CHILDREN)
    ]
    assert all(handed is body for _, _, handed in seen.events)


def test_no_object_is_copied_for_a_comparison() -> None:
    """kopf's own storages copied each body three times: more than half of the operator's work in a burst."""
    settings = kopf.OperatorSettings()
    configure_kopf(settings)
    storage = settings.persistence.diffbase_storage
    assert isinstance(storage, NoDiffs)

    class Untouchable(dict[str, Any]):
        def __iter__(self) -> Any:
            raise AssertionError("the body was read")

        def __getitem__(self, _: str) -> Any:
            raise AssertionError("the body was read")

    body = kopf.Body(Untouchable())  # type: ignore[arg-type]
    patch = kopf.Patch()
    assert storage.build(body=body) == {}
    assert storage.fetch(body=body) is None
    storage.store(body=body, patch=patch, essence=kopf.BodyEssence())
    assert not patch


def test_the_settings_are_those_of_production() -> None:
    """Bounded requests, watches that end by themselves, no peering, no Events and no state of kopf's own."""
    settings = kopf.OperatorSettings()
    configure_kopf(settings)
    assert (settings.networking.request_timeout, settings.networking.connect_timeout) == (20, 5)
    watching = settings.watching
    assert (watching.server_timeout, watching.client_timeout, watching.inactivity_timeout) == (300, 330, 70)
    assert settings.queueing.worker_limit == 32
    assert settings.process.ultimate_exiting_timeout == 30
    assert (settings.posting.enabled, settings.peering.standalone, settings.scanning.disabled) == (False, True, True)
    for resource in WATCHED_CHILDREN.values():
        assert "managed-by=pagefleet-operator" in settings.watching.label_selectors[resource.group, resource.plural]


def test_nothing_makes_kopf_write_a_finalizer_or_an_annotation() -> None:
    registry = build_registry(Seen())  # type: ignore[arg-type]
    assert not registry._changing.get_all_handlers()
    assert not registry._spawning.get_all_handlers()
    assert len(registry._watching.get_all_handlers()) == 1 + len(WATCHED_CHILDREN)
