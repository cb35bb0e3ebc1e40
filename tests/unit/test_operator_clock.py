"""The clock that scaling runs on."""

from typing import Any

from pagefleet_operator.clock import steady_clock


def test_a_jump_of_the_wall_clock_moves_nothing(monkeypatch: Any) -> None:
    wall, monotonic = [1_000_000.0], [50.0]
    monkeypatch.setattr("time.time", lambda: wall[0])
    monkeypatch.setattr("time.monotonic", lambda: monotonic[0])
    clock = steady_clock()
    assert clock() == 1_000_000.0
    wall[0] += 86_400
    monotonic[0] += 2
    assert clock() == 1_000_002.0
