"""Who goes first: priorities, tenants, salts."""

from support.kv_memory_runner import expected_tokens
from support.scheduling import Bench, make_limits, make_prompt, shape


def test_more_important_request_takes_the_place_of_a_running_one() -> None:
    bench = Bench(make_limits(max_num_seqs=1))
    bench.add("batch", make_prompt(6), max_tokens=8, priority=10)
    bench.step()
    bench.add("chat", make_prompt(5, first=20), max_tokens=2)
    assert shape(bench.step()) == [("chat", 0, 5, True)]
    assert bench.scheduler.counts().num_preemptions == 1
    bench.run()
    assert bench.tokens["batch"] == expected_tokens(make_prompt(6), 8)
    assert bench.tokens["chat"] == expected_tokens(make_prompt(5, first=20), 2)


def test_more_important_request_takes_the_blocks_of_as_many_as_it_needs() -> None:
    bench = Bench(make_limits(num_blocks=8), prefix_caching=False)
    for index, request_id in enumerate(("one", "two")):
        bench.add(request_id, make_prompt(6, first=10 * index), max_tokens=8, priority=1)
    bench.step()
    bench.add("chat", make_prompt(16, first=30), max_tokens=2)
    assert shape(bench.step()) == [("one", 6, 1, True), ("chat", 0, 15, False)]
    assert bench.scheduler.counts().num_preemptions == 1


def test_nobody_is_preempted_when_it_would_not_help() -> None:
    bench = Bench(make_limits(num_blocks=8), prefix_caching=False)
    bench.add("equal", make_prompt(14), max_tokens=8)
    bench.add("lesser", make_prompt(4, first=20), max_tokens=8, priority=1)
    bench.step()
    bench.add("large", make_prompt(24, first=30), max_tokens=2)
    bench.step()
    assert bench.scheduler.counts().num_preemptions == 0


def test_nobody_is_preempted_for_seats_that_others_keep() -> None:
    bench = Bench(make_limits(max_num_seqs=4))
    for index in range(2):
        bench.add(f"equal{index}", make_prompt(4, first=10 * index), max_tokens=4)
        bench.add(f"lesser{index}", make_prompt(4, first=25 + 10 * index), max_tokens=4, priority=1)
    bench.step()
    bench.add_group(["a", "b", "c"], make_prompt(5, first=20))
    bench.step()
    assert bench.scheduler.counts().num_preemptions == 0
    bench.run()
    assert bench.tokens["c"] == expected_tokens(make_prompt(5, first=20), 4, 2)


def test_nobody_is_preempted_for_blocks_that_others_hold_too() -> None:
    bench = Bench(make_limits(num_blocks=8))
    bench.add("equal", make_prompt(13), max_tokens=4)
    bench.add("lesser", make_prompt(13), max_tokens=4, priority=1)  # 3 of its 4 blocks are the other's
    bench.step()
    bench.step()
    bench.add("large", make_prompt(19, first=30), max_tokens=1)  # 5 blocks; 3 are free, with the lesser one's 4
    bench.step()
    assert bench.scheduler.counts().num_preemptions == 0


def test_nobody_is_preempted_for_cached_blocks_that_stay_in_use() -> None:
    bench = Bench(make_limits(num_blocks=8))
    bench.add("equal", make_prompt(14, first=30), max_tokens=3)
    bench.add("lesser", make_prompt(9), max_tokens=4, priority=1)
    bench.step()
    bench.step()
    bench.add("large", make_prompt(23), max_tokens=1)  # 6 blocks, two of them the lesser one's; no fourth would be free
    bench.step()
    assert bench.scheduler.counts().num_preemptions == 0


def test_equal_priority_never_preempts_to_get_in() -> None:
    bench = Bench(make_limits(max_num_seqs=1))
    bench.add("a", make_prompt(6), max_tokens=8, priority=3)
    bench.step()
    bench.add("b", make_prompt(5, first=20), max_tokens=2, priority=3)
    assert shape(bench.step()) == [("a", 6, 1, True)]


def test_tenant_with_one_request_does_not_wait_for_a_flood() -> None:
    bench = Bench(make_limits(max_num_seqs=1))
    for index in range(20):
        bench.add(f"flood{index}", make_prompt(6, first=index), max_tokens=3, tenant="flood")
    bench.step()
    bench.add("single", make_prompt(6, first=40), max_tokens=3, tenant="single")
    order = [row.request_id for output in bench.run() for row in output.scheduled if row.start == 0]
    assert order.index("single") == 0


def test_latest_admission_is_preempted_first_even_if_it_arrived_before() -> None:
    """`late` arrived first but was let in last; a rule by arrival would make the fair queue's choice undo itself."""
    bench = Bench(make_limits(num_blocks=6), prefix_caching=False)
    bench.add("a", make_prompt(12), max_tokens=8, tenant="flood")
    bench.add("late", make_prompt(7, first=20), max_tokens=8, tenant="flood")
    bench.add("single", make_prompt(4, first=40), max_tokens=8, tenant="single")
    assert [row[0] for row in shape(bench.step())] == ["a", "single"]
    bench.run()
    assert bench.tokens["single"] == expected_tokens(make_prompt(4, first=40), 8)


def test_blocks_are_shared_only_within_tenant_and_salt() -> None:
    bench = Bench(make_limits(num_blocks=32))
    bench.add("base", make_prompt(9), max_tokens=1, tenant="t", cache_salt="s")
    bench.run()
    starts: dict[str, int] = {}
    for name, tenant, salt in (("same", "t", "s"), ("salt", "t", ""), ("tenant", "", "s"), ("swapped", "s", "t")):
        bench.add(name, make_prompt(9), max_tokens=1, tenant=tenant, cache_salt=salt)
        starts[name] = shape(bench.step())[0][1]
    assert starts == {"same": 8, "salt": 0, "tenant": 0, "swapped": 0}


def test_reset_lets_nobody_find_old_blocks_while_running_requests_go_on() -> None:
    bench = Bench(make_limits())
    bench.add("a", make_prompt(9), max_tokens=6)
    bench.step()
    bench.scheduler.reset_prefix_cache()
    bench.add("b", make_prompt(9), max_tokens=2)
    assert shape(bench.step()) == [("a", 9, 1, True), ("b", 0, 9, True)]
    bench.run()
    assert bench.tokens["a"] == expected_tokens(make_prompt(9), 6)
