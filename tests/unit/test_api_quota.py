"""What one key may send: a rate with a burst of a minute, and a number at once."""

from contextlib import ExitStack

import pytest

from pagefleet_server.api.errors import QuotaError
from pagefleet_server.api.quota import Limits, Quota


class Clock:
    """Virtual time."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def refusal(quota: Quota) -> QuotaError:
    with pytest.raises(QuotaError) as refused, quota.spend():
        pass
    return refused.value


def spend(quota: Quota, times: int = 1) -> None:
    for _ in range(times):
        with quota.spend():
            pass


def test_without_limits_everything_passes() -> None:
    spend(Quota(Limits(), clock=Clock()), 1000)


def test_a_minute_of_silence_buys_a_minute_of_requests_at_once() -> None:
    clock = Clock()
    quota = Quota(Limits(requests_per_minute=6), clock=clock)
    spend(quota, 6)
    error = refusal(quota)
    assert (error.status, error.code, error.refusal.retry_after_seconds) == (429, "rate_limit", 10)
    clock.now += 9.5
    assert refusal(quota).refusal.retry_after_seconds == 1
    clock.now += 0.5
    spend(quota)
    assert refusal(quota).code == "rate_limit", "refused requests cost nothing, and give nothing"
    clock.now += 3600
    spend(quota, 6)
    refusal(quota)


def test_over_any_long_time_the_rate_holds() -> None:
    clock = Clock()
    quota = Quota(Limits(requests_per_minute=30), clock=clock)
    served = 0
    for _ in range(6000):
        try:
            spend(quota)
            served += 1
        except QuotaError:
            pass
        clock.now += 0.1
    assert 300 <= served <= 331, "ten minutes at 30, and the first burst"


def test_so_many_at_once_and_no_more() -> None:
    clock = Clock()
    quota = Quota(Limits(concurrent_requests=2), clock=clock)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(quota.spend())
        error = refusal(quota)
        assert (error.status, error.code) == (429, "concurrency_limit")
        assert 1 <= error.refusal.retry_after_seconds <= 60
    spend(quota, 3)


def test_a_request_that_fails_gives_its_place_back() -> None:
    quota = Quota(Limits(concurrent_requests=1), clock=Clock())
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), quota.spend():
            raise ZeroDivisionError
