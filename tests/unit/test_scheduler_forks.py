"""Requests that share a prompt: computed once, shared by reference, copied on write."""

import pytest

from pagefleet_server.core.scheduler import RequestRefused
from support.kv_memory_runner import expected_tokens
from support.scheduling import Bench, make_limits, make_prompt, make_sampling, shape


def check_outputs(bench: Bench, ids: list[str], prompt: list[int], count: int) -> None:
    for seed, request_id in enumerate(ids):
        assert bench.tokens[request_id] == expected_tokens(prompt, count, seed), request_id


@pytest.mark.parametrize(("length", "want_copies"), [(7, 2), (8, 0), (9, 2), (1, 2)])
def test_prompt_is_computed_once_and_only_a_partial_last_block_is_copied(length: int, want_copies: int) -> None:
    """All but the last holder copy; at a block boundary each takes a new block anyway."""
    bench = Bench(make_limits())
    ids = ["a", "b", "c"]
    bench.add_group(ids, make_prompt(length))
    first = bench.step()
    assert first is not None
    assert shape(first) == [("a", 0, length, True)]
    assert [fork.request_id for fork in first.scheduled[0].forks] == ["b", "c"]
    blocks = -(-length // 4)
    assert bench.scheduler.counts().blocks_used == blocks
    second = bench.step()
    assert second is not None
    assert shape(second) == [(request_id, length, 1, True) for request_id in ids]
    assert len(second.copies) == want_copies
    assert bench.scheduler.counts().blocks_used == blocks + (want_copies or 3)
    bench.run()
    check_outputs(bench, ids, make_prompt(length), 4)


def test_group_needs_a_seat_for_each_and_is_refused_when_there_can_never_be_enough() -> None:
    bench = Bench(make_limits(max_num_seqs=3))
    bench.add("x", make_prompt(3, first=40), max_tokens=2)
    bench.add_group(["a", "b", "c"], make_prompt(5))
    assert shape(bench.step()) == [("x", 0, 3, True)]
    assert bench.scheduler.counts().num_waiting == 3
    with pytest.raises(RequestRefused, match="4 sequences at once; at most 3 can run"):
        bench.scheduler.add_group(list("defg"), [1], [make_sampling()] * 4, arrival_time=0.0)
    bench.run()
    check_outputs(bench, ["a", "b", "c"], make_prompt(5), 4)


def test_group_larger_than_the_pool_still_ends_one_after_the_other() -> None:
    bench = Bench(make_limits(num_blocks=3, max_num_seqs=4, max_model_len=12), prefix_caching=False)
    bench.add_group(list("abcd"), make_prompt(5), max_tokens=7)
    bench.run()
    assert bench.scheduler.counts().num_preemptions >= 2
    check_outputs(bench, list("abcd"), make_prompt(5), 7)


@pytest.mark.parametrize("gone", ["a", "b", "c"])
@pytest.mark.parametrize("num_steps", range(6))
def test_abort_of_one_leaves_the_others_alone(gone: str, num_steps: int) -> None:
    """At every boundary: waiting, in the middle of the prompt, just forked, decoding."""
    bench = Bench(make_limits(max_num_batched_tokens=4))
    ids = ["a", "b", "c"]
    bench.add_group(ids, make_prompt(9))
    for _ in range(num_steps):
        bench.step()
    assert bench.scheduler.abort(gone)
    bench.scheduler.check_integrity()
    bench.run()
    for seed, request_id in enumerate(ids):
        want = expected_tokens(make_prompt(9), 4, seed)
        if request_id == gone:
            assert bench.tokens[request_id] == want[: len(bench.tokens[request_id])]
            assert request_id not in bench.finish
        else:
            assert bench.tokens[request_id] == want
    assert bench.scheduler.counts().blocks_used == 0


@pytest.mark.parametrize("num_steps", range(5))
@pytest.mark.parametrize("order", ["abc", "cba", "bac"])
def test_abort_of_all_frees_everything_within_the_step(num_steps: int, order: str) -> None:
    bench = Bench(make_limits(max_num_batched_tokens=4))
    bench.add_group(["a", "b", "c"], make_prompt(9))
    for _ in range(num_steps):
        bench.step()
    for request_id in order:
        assert bench.scheduler.abort(request_id)
        bench.scheduler.check_integrity()
    counts = bench.scheduler.counts()
    assert (counts.blocks_used, counts.num_running, counts.num_waiting, counts.blocks_waiting) == (0, 0, 0, 0)
    assert not bench.scheduler.has_work


def test_waiting_group_wants_its_prompt_once_and_a_copy_for_each_other_sibling() -> None:
    bench = Bench(make_limits(num_blocks=4))
    bench.add("x", make_prompt(16, first=30), max_tokens=1)
    bench.step()
    bench.add("y", make_prompt(16, first=20), max_tokens=1)
    bench.add_group(["a", "b", "c"], make_prompt(5))
    assert bench.scheduler.counts().blocks_waiting == 4 + 2 + 2
    bench.scheduler.abort("a")
    assert bench.scheduler.counts().blocks_waiting == 4 + 2 + 1, "one of two has the last block for itself"
    assert bench.scheduler.counts().num_waiting == 3


def test_fork_in_an_overlapped_step_takes_placeholders_and_copies() -> None:
    bench = Bench(make_limits())
    bench.add_group(["a", "b"], make_prompt(6), max_tokens=2)
    first, second = bench.schedule(), bench.schedule()
    assert first is not None
    assert second is not None
    assert len(second.copies) == 1
    assert [row.token_ids for row in second.scheduled] == [(-1,), (-1,)]
    for output in (first, second):
        bench.take(bench.scheduler.update(output, bench.runner.execute(output)))
        bench.scheduler.check_integrity()
    check_outputs(bench, ["a", "b"], make_prompt(6), 2)


def test_sharing_saves_most_of_the_memory_of_eight_samples() -> None:
    """Blocks at the end of 8 samples of 20 tokens over a prompt of 150: shared against one by one."""

    def peak(*, forked: bool) -> int:
        limits = make_limits(
            num_blocks=128, block_size=16, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=256
        )
        bench = Bench(limits, prefix_caching=False)
        ids = list("abcdefgh")
        if forked:
            bench.add_group(ids, make_prompt(150), max_tokens=20)
        else:
            for request_id in ids:
                bench.add(request_id, make_prompt(150), max_tokens=20)
        used = 0
        while bench.scheduler.has_work:
            bench.step()
            used = max(used, bench.scheduler.counts().blocks_used)
        return used

    assert peak(forked=False) == 8 * 11
    assert peak(forked=True) == 9 + 8 * 2
