"""Who gets in next."""

import pytest

from pagefleet_server.core.request import Request
from pagefleet_server.core.waiting_queue import MAX_IDLE_TENANTS, WaitingQueue
from support.scheduling import make_sampling


def make_request(number: int, *, tenant: str = "", priority: int = 0, preempted: bool = False) -> Request:
    request = Request(
        f"r{number}", [1], make_sampling(), arrival_time=0.0, number=number, tenant=tenant, priority=priority
    )
    if preempted:
        request.start(0.0, num_cached=0, admission=number)
        request.preempt(0.0)
    return request


def test_preempted_requests_go_first_in_their_own_order_whenever_they_were_preempted() -> None:
    queue = WaitingQueue()
    requests = [make_request(number, preempted=number < 3) for number in range(5)]
    for request in requests[3:]:
        queue.add(request)
    for order in (2, 0, 1):
        queue.put_back(requests[order])
    assert list(queue) == requests
    assert queue.first() is requests[0]
    for request in (requests[1], requests[3]):
        queue.remove(request)
    assert list(queue) == [requests[0], requests[2], requests[4]]
    assert len(queue) == 3


def test_removing_a_stranger_is_an_error() -> None:
    queue = WaitingQueue()
    queue.add(make_request(0))
    queue.put_back(make_request(1, preempted=True))
    for stranger in (make_request(2), make_request(3, preempted=True)):
        with pytest.raises(KeyError, match=stranger.request_id):
            queue.remove(stranger)


def names(queue: WaitingQueue, *, tokens: int) -> list[str]:
    """Let everybody in, one after the other, each served so many tokens at once."""
    order = []
    while (request := queue.first()) is not None:
        queue.admit(request)
        queue.charge(request.tenant, tokens)
        order.append(request.request_id)
    return order


def test_single_request_of_one_tenant_passes_a_queue_of_another() -> None:
    queue = WaitingQueue()
    for number in range(4):
        queue.add(make_request(number, tenant="flood"))
    queue.add(make_request(9, tenant="single"))
    assert names(queue, tokens=100) == ["r0", "r9", "r1", "r2", "r3"]


def test_tenants_alternate_by_tokens_served_not_by_requests() -> None:
    queue = WaitingQueue()
    for number in range(3):
        queue.add(make_request(number, tenant="long"))
        queue.add(make_request(10 + number, tenant="short"))
    order = []
    while (request := queue.first()) is not None:
        queue.admit(request)
        queue.charge(request.tenant, 200 if request.tenant == "long" else 100)
        order.append(request.request_id)
    assert order == ["r0", "r10", "r11", "r1", "r12", "r2"]


def test_tenant_that_was_away_gets_no_credit_for_it() -> None:
    queue = WaitingQueue()
    for number in range(3):
        queue.add(make_request(number, tenant="busy"))
    for _ in range(2):
        first = queue.first()
        assert first is not None
        queue.admit(first)
        queue.charge("busy", 1000)
    for number in range(10, 14):
        queue.add(make_request(number, tenant="back"))
    # "back" starts at the 1000 at which the last request of "busy" got in, so it is not served 2000 tokens ahead.
    assert names(queue, tokens=400) == ["r10", "r11", "r12", "r2", "r13"]


def test_debt_is_kept_while_idle() -> None:
    queue = WaitingQueue()
    queue.add(make_request(0, tenant="greedy"))
    assert names(queue, tokens=5000) == ["r0"]
    queue.add(make_request(1, tenant="greedy"))
    queue.add(make_request(2, tenant="modest"))
    assert names(queue, tokens=10) == ["r2", "r1"]


def test_more_important_priority_goes_before_preempted_requests_of_a_lesser_one() -> None:
    queue = WaitingQueue()
    queue.put_back(make_request(0, priority=1, preempted=True))
    queue.add(make_request(1, priority=1))
    queue.add(make_request(2, priority=-1))
    queue.add(make_request(3))
    assert names(queue, tokens=1) == ["r2", "r3", "r0", "r1"]


def test_flood_of_tenants_does_not_grow_the_accounts() -> None:
    queue = WaitingQueue()
    for number in range(3 * MAX_IDLE_TENANTS):
        queue.add(make_request(number, tenant=f"t{number}"))
        names(queue, tokens=1)
    assert queue.num_accounts <= MAX_IDLE_TENANTS + 1
