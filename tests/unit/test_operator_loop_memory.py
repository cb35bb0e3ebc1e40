"""What a loop remembers: children that were refused are not sent again at once."""

import pytest

from pagefleet_operator.errors import ApiError
from pagefleet_operator.loop_memory import Memory, refusal
from pagefleet_operator.settings import ReconcileSettings

SETTINGS = ReconcileSettings(min_backoff_seconds=0.5, max_backoff_seconds=30.0)


def held_until(memory: Memory, digest: str = "d") -> float:
    """In tenths of a second."""
    return next(tenth for tenth in range(1000) if memory.held(digest, 100.0 + tenth / 10, SETTINGS) is None) / 10


@pytest.mark.parametrize(("failures", "want"), [(3, 4.0), (4, 8.0), (5, 16.0), (6, 30.0), (500, 30.0)])
def test_after_an_outage_the_same_is_tried_again_after_pauses_that_double(failures: int, want: float) -> None:
    memory = Memory("uid", apply_failures=failures)
    memory.refused = refusal(ApiError(status=500, reason="InternalError", message="etcd is unwell"), "d", 100.0)
    assert held_until(memory) == want


def test_what_the_api_does_not_want_waits_longest_and_something_else_is_sent_at_once() -> None:
    memory = Memory("uid", apply_failures=1)
    memory.refused = refusal(ApiError(status=422, reason="Invalid", message="spec.x: bad"), "d", 100.0)
    assert held_until(memory) == 30.0
    assert held_until(memory, "another") == 0.0
    memory.refused = None
    assert held_until(memory) == 0.0
