"""Objects, versions and the bounded history."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pagefleet_localcluster.api.errors import ApiError
from pagefleet_localcluster.api.store import MAX_OBJECT_BYTES, Store

MAPS = ("", "configmaps")


def _obj(name: str, **data: Any) -> dict[str, Any]:
    return {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": name}, "data": data}


def test_history_is_bounded_by_count_and_by_bytes() -> None:
    store = Store(history_changes=5, history_bytes=10_000)
    for index in range(20):
        store.put(MAPS, ("", "m"), _obj("m", a=str(index)))
    assert store.history_size()[0] == 5
    store.put(MAPS, ("", "m"), _obj("m", a="x" * 9_500))
    assert store.history_size()[1] <= 10_000


def test_changes_before_the_history_are_expired() -> None:
    store = Store(history_changes=2)
    first = store.put(MAPS, ("", "m"), _obj("m", a="0"))
    for index in range(4):
        store.put(MAPS, ("", "m"), _obj("m", a=str(index)))
    with pytest.raises(ApiError) as caught:
        store.changes_since(MAPS, first.version)
    assert caught.value.code == 410
    assert len(store.changes_since(MAPS, store.version - 2)) == 2


def test_too_large_an_object_leaves_everything_as_it_was() -> None:
    store = Store()
    store.put(MAPS, ("", "m"), _obj("m", a="1"))
    version = store.version
    with pytest.raises(ApiError) as caught:
        store.put(MAPS, ("", "m"), _obj("m", a="x" * MAX_OBJECT_BYTES))
    assert caught.value.code == 413
    assert store.version == version
    found = store.get(MAPS, ("", "m"))
    assert found is not None
    assert found.obj["data"] == {"a": "1"}


def test_a_copy_does_not_touch_what_is_stored() -> None:
    store = Store()
    stored = store.put(MAPS, ("", "m"), _obj("m", a="1"))
    stored.copy()["data"]["a"] = "2"
    assert stored.obj["data"] == {"a": "1"}


def test_a_version_of_the_past_keeps_its_text_alone() -> None:
    """Memory grew to five times the watch window's text while old versions kept their objects."""
    store = Store()
    old = store.put(MAPS, ("", "m"), _obj("m", a="1"))
    new = store.put(MAPS, ("", "m"), _obj("m", a="2"))
    assert old.obj is not old.obj
    assert new.obj is new.obj
    assert old.obj["data"] == {"a": "1"}


@settings(max_examples=30, stateful_step_count=40)
class StoreMachine(RuleBasedStateMachine):
    """At every version that the history reaches, the past can be told exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(history_changes=8)
        self.past: dict[int, dict[str, Any]] = {self.store.version: {}}

    def _now(self) -> dict[str, Any]:
        return {stored.obj["metadata"]["name"]: stored.obj["data"] for stored in self.store.all(MAPS)}

    @rule(name=st.sampled_from("abc"), value=st.integers(0, 3))
    def put(self, name: str, value: int) -> None:
        self.store.put(MAPS, ("", name), _obj(name, v=str(value)))
        self.past[self.store.version] = self._now()

    @rule(name=st.sampled_from("abc"))
    def remove(self, name: str) -> None:
        if self.store.get(MAPS, ("", name)) is not None:
            self.store.remove(MAPS, ("", name))
            self.past[self.store.version] = self._now()

    @rule()
    def put_elsewhere(self) -> None:
        self.store.put(("", "secrets"), ("", "s"), _obj("s"))
        self.past[self.store.version] = self._now()

    @invariant()
    def the_past_is_exact_or_expired(self) -> None:
        for version, want in self.past.items():
            try:
                found = self.store.at_version(MAPS, version)
            except ApiError as error:
                assert error.code == 410
                continue
            assert {name[1]: stored.obj["data"] for name, stored in found.items()} == want


TestStore = StoreMachine.TestCase
