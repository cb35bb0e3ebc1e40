"""The door: how many may wait, when to come back, how long is too long, and the way out."""

import asyncio

import pytest

from pagefleet_server.api.admission import MAX_RETRY_SECONDS, RATE_WINDOW_SECONDS, FinishRate, Load, Room, count_excess
from pagefleet_server.api.drain import Drain
from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.lengths import check_text_bytes, check_token_ids, resolve_max_tokens


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("case", "load", "room", "num_new", "want_excess"),
    [
        ("idle server", Load(0, 0, 0), Room(0, 4), 1, 0),
        ("no queue, seats free, one on its way", Load(2, 0, 1), Room(0, 4), 1, 0),
        ("no queue, the last seat is taken by one on its way", Load(2, 0, 2), Room(0, 4), 1, 1),
        ("seats full, queue has room", Load(4, 0, 0), Room(2, 4), 2, 0),
        ("seats full, queue has room for one", Load(4, 1, 0), Room(2, 4), 2, 1),
        ("queue full", Load(4, 2, 0), Room(2, 4), 1, 1),
        ("blocks are short: free seats do not help", Load(1, 2, 0), Room(2, 4), 1, 1),
        ("unread ones fill the queue", Load(4, 0, 2), Room(2, 4), 1, 1),
        ("no more than what is new", Load(4, 9, 0), Room(2, 4), 1, 1),
    ],
)
def test_the_bound_of_the_queue(case: str, load: Load, room: Room, num_new: int, want_excess: int) -> None:
    assert count_excess(load, room, num_new) == want_excess, case


def test_retry_after_follows_the_rate_at_which_requests_end() -> None:
    clock = Clock()
    rate = FinishRate(clock)
    assert rate.seconds_for(1) == 10, "nothing is known"
    for _ in range(20):
        rate.note()
        clock.now += 0.5
    assert rate.seconds_for(1) == 1
    assert rate.seconds_for(10) == 5
    assert rate.seconds_for(10_000) == MAX_RETRY_SECONDS
    clock.now += 3600
    assert rate.seconds_for(1) == 10, "old ones are forgotten"


def test_a_rate_that_nobody_asks_for_remembers_no_more_than_its_window() -> None:
    """Each API key has one, and most keys are never refused."""
    clock = Clock()
    rate = FinishRate(clock)
    for _ in range(10_000):
        rate.note()
        clock.now += 1.0
    assert rate.num_noted <= RATE_WINDOW_SECONDS + 1


@pytest.mark.parametrize(
    ("num_prompt", "wanted", "default", "want"),
    [(10, None, 16, 16), (95, None, 16, 5), (10, None, None, 90), (10, 90, 16, 90), (99, 1, 16, 1)],
)
def test_defaults_are_cut_to_the_room(num_prompt: int, wanted: int | None, default: int | None, want: int) -> None:
    assert resolve_max_tokens(num_prompt, wanted, default=default, max_model_len=100) == want


@pytest.mark.parametrize(
    ("num_prompt", "wanted", "want_numbers"),
    [(90, 11, ["100", "101", "90", "11", "10"]), (100, None, ["100"]), (8192, 12, ["100", "8192"])],
)
def test_an_explicit_overflow_is_refused_with_the_numbers(
    num_prompt: int, wanted: int | None, want_numbers: list[str]
) -> None:
    with pytest.raises(BadRequestError) as refused:
        resolve_max_tokens(num_prompt, wanted, default=None, max_model_len=100)
    assert refused.value.code == "context_length_exceeded"
    assert all(number in str(refused.value) for number in want_numbers)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(BadRequestError, match="no tokens"):
        resolve_max_tokens(0, None, default=16, max_model_len=100)


def test_a_text_that_cannot_fit_is_refused_by_its_bytes() -> None:
    check_text_bytes(99 * 8, max_token_bytes=8, max_model_len=100)
    with pytest.raises(BadRequestError, match="at least 100 tokens"):
        check_text_bytes(99 * 8 + 1, max_token_bytes=8, max_model_len=100)


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    asyncio.run(check_token_ids([0, 9], 10))
    with pytest.raises(BadRequestError, match=r"10 is not in the vocabulary \(0\.\.9\)"):
        asyncio.run(check_token_ids([0, 10], 10))


def test_a_drain_goes_through_its_phases_by_the_clock() -> None:
    clock = Clock()
    drain = Drain(delay_seconds=10, timeout_seconds=300, clock=clock)
    assert (drain.active, drain.refuses) == (False, False)
    assert drain.begin()
    assert (drain.active, drain.refuses) == (True, False)
    clock.now += 9
    assert (drain.refuses, drain.seconds_to_refusal, drain.seconds_to_expiry) == (False, 1, 301)
    clock.now += 1
    assert (drain.refuses, drain.seconds_to_refusal, drain.seconds_to_expiry) == (True, 0, 300)
    clock.now += 1000
    assert drain.seconds_to_expiry == 0


def test_a_second_signal_changes_nothing() -> None:
    clock = Clock()
    drain = Drain(delay_seconds=10, timeout_seconds=300, clock=clock)
    assert drain.begin()
    clock.now += 9
    assert not drain.begin()
    assert drain.seconds_to_refusal == 1
