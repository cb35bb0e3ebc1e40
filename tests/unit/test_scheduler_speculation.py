"""Guessed tokens in the scheduler: the same tokens in fewer steps, and nobody else notices."""

from itertools import pairwise

import pytest

from pagefleet_server.core.prompt_lookup import SpeculationLimits
from pagefleet_server.core.request import RequestStateError
from pagefleet_server.core.step import DrawnToken, SchedulerOutput, StepResult
from support.kv_memory_runner import expected_tokens
from support.scheduling import Bench, make_limits, make_prompt, make_sampling

SPECULATION = SpeculationLimits(num_tokens=5, min_ngram=1, max_ngram=3, max_num_seqs=2)
LOOP = [12, 13, 14] * 3


def make_bench(**limits: int) -> Bench:
    defaults = {"num_blocks": 32, "max_model_len": 128, "max_num_batched_tokens": 32}
    return Bench(make_limits(**(defaults | limits), speculation=SPECULATION), loops=True)


def num_drafts(outputs: list[SchedulerOutput]) -> list[int]:
    return [sum(row.num_drafts for row in output.scheduled) for output in outputs]


def test_the_same_tokens_in_fewer_steps() -> None:
    bench = make_bench()
    bench.add("a", LOOP, 40)
    outputs = bench.run()
    assert bench.tokens["a"] == expected_tokens(LOOP, 40, loops=True)
    counts = bench.scheduler.counts()
    accepted = sum(counts.num_accepted_by_place)
    assert len(outputs) == 40 - accepted
    assert len(outputs) < 25
    assert counts.num_draft_tokens == sum(num_drafts(outputs))
    assert counts.num_drafts == sum(1 for drafts in num_drafts(outputs) if drafts)
    assert list(counts.num_accepted_by_place) == sorted(counts.num_accepted_by_place, reverse=True)


def test_wrong_guesses_leave_no_block_and_no_cached_content() -> None:
    """After every step the request holds the blocks of its computed tokens; what the cache knows is what was said."""
    bench = make_bench(num_blocks=32)
    bench.add("a", LOOP, 40)
    while bench.scheduler.has_work:
        bench.step()
        if bench.scheduler.has_work:
            num_computed = len(LOOP) + len(bench.tokens["a"]) - 1
            assert bench.scheduler.counts().blocks_used == -(-num_computed // 4)
    counts = bench.scheduler.counts()
    assert counts.num_draft_tokens > sum(counts.num_accepted_by_place) > 0
    num_full = (len(LOOP) + 40 - 1) // 4
    assert counts.blocks_cached == num_full
    bench.add("again", [*LOOP, *bench.tokens["a"]], 1)
    first = bench.step()
    assert first is not None
    assert first.scheduled[0].start == num_full * 4


def test_nobody_guesses_beside_a_prompt_or_beyond_the_bound() -> None:
    bench = make_bench(max_num_batched_tokens=8)
    bench.add("a", LOOP, 60)
    for _ in range(4):
        bench.step()
    bench.add("long", make_prompt(40), 20)
    beside = []
    while "long" not in {name for name, tokens in bench.tokens.items() if tokens}:
        output = bench.step()
        assert output is not None
        beside.append(output)
    assert len(beside) > 5
    assert num_drafts(beside) == [0] * len(beside)
    bench.add("third", make_prompt(3), 10)
    bench.add("fourth", make_prompt(4), 10)
    bench.step()
    three = [bench.step() for _ in range(5)]
    assert [len(output.scheduled) for output in three if output is not None] == [4] * 5
    assert num_drafts([output for output in three if output is not None]) == [0] * 5


def test_guesses_take_no_block_that_somebody_needs() -> None:
    """A pool that just holds both requests: with guesses there are no more preemptions than without."""
    bench = make_bench(num_blocks=13)
    bench.add("a", LOOP, 16)
    bench.add("b", [*LOOP[:5], 3], 20)
    outputs = bench.run()
    assert bench.scheduler.counts().num_preemptions == 0
    assert sum(num_drafts(outputs)) > 0
    assert bench.tokens["a"] == expected_tokens(LOOP, 16, loops=True)


def test_guesses_end_before_a_stop_id_and_before_max_tokens() -> None:
    wanted = expected_tokens(LOOP, 40, loops=True)
    stop = next(token for token in wanted[20:] if token not in wanted[:20])
    bench = make_bench()
    bench.add("a", LOOP, 40, stop=(stop,))
    outputs = bench.run()
    assert bench.tokens["a"] == wanted[: wanted.index(stop) + 1]
    assert bench.finish["a"] == "stop"
    for output in outputs:
        (row,) = output.scheduled
        assert stop not in row.token_ids[len(row.token_ids) - row.num_drafts :]
        assert row.start + len(row.token_ids) < len(LOOP) + 40


def test_tokens_of_a_step_come_in_one_message_with_what_became_of_the_guesses() -> None:
    bench = make_bench()
    bench.add("a", LOOP, 30)
    totals = [(0, 0)]
    while bench.scheduler.has_work:
        output = bench.schedule()
        assert output is not None
        (new,) = bench.scheduler.update(output, bench.runner.execute(output))
        accepted = len(new.token_ids) - 1
        totals.append((new.num_draft_tokens, new.num_accepted_tokens))
        assert totals[-1] == (totals[-2][0] + output.scheduled[0].num_drafts, totals[-2][1] + accepted)
    assert all(earlier <= later for earlier, later in pairwise(totals))


def test_overlapped_steps_check_one_guess_at_a_time() -> None:
    """With a step in flight the next input is not known: nothing is guessed, and nothing breaks."""
    bench = make_bench()
    bench.add("a", LOOP, 20)
    in_flight = [bench.schedule()]
    while bench.scheduler.has_work:
        output = bench.schedule()
        if output is not None:
            in_flight.append(output)
        done = in_flight.pop(0)
        assert done is not None
        bench.take(bench.scheduler.update(done, bench.runner.execute(done)))
        bench.scheduler.check_integrity()
    assert bench.tokens["a"] == expected_tokens(LOOP, 20, loops=True)


def test_an_abort_while_guesses_are_checked_frees_everything() -> None:
    bench = make_bench()
    bench.add("a", LOOP, 40)
    output = bench.step()
    while output is not None and not output.scheduled[0].num_drafts:
        output = bench.schedule()
        assert output is not None
        if not output.scheduled[0].num_drafts:
            bench.take(bench.scheduler.update(output, bench.runner.execute(output)))
    assert bench.scheduler.abort("a")
    assert output is not None
    assert bench.scheduler.update(output, bench.runner.execute(output)) == []
    bench.scheduler.check_integrity()
    assert bench.scheduler.counts().blocks_used == 0


def test_more_tokens_than_guesses_are_a_fault_of_the_runner() -> None:
    bench = make_bench()
    bench.scheduler.add("a", LOOP, make_sampling(5), arrival_time=0.0)
    output = bench.schedule()
    assert output is not None
    result = StepResult({"a": 1}, further={"a": [DrawnToken(2)]})
    with pytest.raises(RequestStateError, match="2 tokens for 0 drafts"):
        bench.scheduler.update(output, result)


@pytest.mark.parametrize("aborted", [None, "a"])
def test_nobody_guesses_at_the_end_of_a_prompt_that_others_wait_for(aborted: str | None) -> None:
    """A group of two takes one seat once its first is aborted: that must not look like one that decodes alone."""
    bench = make_bench(max_num_batched_tokens=len(LOOP) - 1)
    bench.add_group(["a", "b"], LOOP, max_tokens=20)
    bench.step()
    if aborted is not None:
        assert bench.scheduler.abort(aborted)
    output = bench.step()
    assert output is not None
    assert [(len(row.token_ids), row.num_drafts, len(row.forks)) for row in output.scheduled] == [(1, 0, 1)]
    bench.run()
    assert len(bench.tokens["b"]) == 20
