"""The collector spares the event loop, and still finds every cycle in the end."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from pagefleet_server.api.garbage import MIDDLE_BEFORE_FULL, spare_the_loop


class Knot:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_what_was_there_before_is_not_looked_at_again() -> None:
    old = [Knot() for _ in range(100)]
    spare_the_loop()
    assert gc.get_freeze_count() > 100
    assert not any(item is old[0] for item in gc.get_objects())


def test_full_collections_get_rare_and_still_come() -> None:
    full = 0

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal full
        full += phase == "stop" and info["generation"] == 2

    spare_the_loop()
    gc.set_threshold(10, 2, gc.get_threshold()[2])  # the same with fewer objects
    knot = Knot()
    gc.collect(1)
    gc.collect(1)  # now in the oldest generation
    gone = weakref.ref(knot)
    del knot
    gc.callbacks.append(count)
    try:
        kept = []
        while not full:
            kept.append(Knot())
            assert len(kept) < 100 * MIDDLE_BEFORE_FULL, "never"
    finally:
        gc.callbacks.remove(count)
    assert gone() is None
    assert len(kept) > MIDDLE_BEFORE_FULL
