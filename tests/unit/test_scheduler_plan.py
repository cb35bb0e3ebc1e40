"""What the scheduler puts into a step, by exact sequences."""

from typing import Any

import pytest

from pagefleet_server.core.block_tables import BlockTables
from pagefleet_server.core.limits import SchedulerLimits
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.scheduler import RequestRefused, Scheduler, SchedulerError
from pagefleet_server.core.step import StepResult, TokenLogprobs
from support.kv_memory_runner import expected_tokens
from support.scheduling import Bench, make_limits, make_prompt, make_sampling, shape


def test_prompt_is_computed_in_chunks_and_only_the_last_one_samples() -> None:
    bench = Bench(make_limits(max_num_batched_tokens=8))
    bench.add("a", make_prompt(19), max_tokens=2)
    assert [shape(output) for output in bench.run()] == [
        [("a", 0, 8, False)],
        [("a", 8, 8, False)],
        [("a", 16, 3, True)],
        [("a", 19, 1, True)],
    ]
    assert bench.tokens["a"] == expected_tokens(make_prompt(19), 2)
    assert bench.finish["a"] == "length"


def test_decodes_come_first_then_unfinished_chunks_then_new_requests() -> None:
    bench = Bench(make_limits(max_num_batched_tokens=8, num_blocks=32))
    bench.add("long", make_prompt(18), max_tokens=5)
    bench.step()
    bench.step()
    bench.add("short", make_prompt(3, first=30), max_tokens=5)
    assert shape(bench.step()) == [("long", 16, 2, True), ("short", 0, 3, True)]
    bench.add("next", make_prompt(20, first=40), max_tokens=5)
    output = bench.step()
    assert shape(output) == [("long", 18, 1, True), ("short", 3, 1, True), ("next", 0, 6, False)]
    assert output is not None
    assert (output.num_decodes, output.num_tokens) == (2, 8)


def test_one_token_prompts_count_as_decodes_and_stand_before_chunks() -> None:
    bench = Bench(make_limits())
    bench.add("chunk", make_prompt(5))
    bench.add("single", make_prompt(1, first=40))
    output = bench.step()
    assert shape(output) == [("single", 0, 1, True), ("chunk", 0, 5, True)]
    assert output is not None
    assert output.num_decodes == 1


def test_last_chunk_of_one_token_stands_among_the_decodes() -> None:
    bench = Bench(make_limits(max_num_batched_tokens=8))
    bench.add("a", make_prompt(9))
    bench.step()
    output = bench.step()
    assert shape(output) == [("a", 8, 1, True)]
    assert output is not None
    assert output.num_decodes == 1


def test_request_waits_until_its_whole_prompt_fits() -> None:
    bench = Bench(make_limits(num_blocks=8))
    bench.add("a", make_prompt(16), max_tokens=8)
    bench.step()
    bench.add("b", make_prompt(17, first=20), max_tokens=1)
    assert shape(bench.step()) == [("a", 16, 1, True)]
    counts = bench.scheduler.counts()
    assert (counts.num_waiting, counts.blocks_waiting, counts.oldest_waiting_since) == (1, 5, 1.0)


def test_promised_blocks_are_not_given_to_another_request() -> None:
    """`long` computes 8 of its 24 tokens per step; the blocks of the rest must be there when it comes to them."""
    bench = Bench(make_limits(num_blocks=8, max_num_batched_tokens=8))
    bench.add("long", make_prompt(24), max_tokens=1)
    bench.step()
    bench.add("other", make_prompt(8, first=30), max_tokens=1)
    assert bench.scheduler.counts().blocks_used == 2
    outputs = bench.run()
    assert shape(outputs[0]) == [("long", 8, 8, False)]
    assert bench.scheduler.counts().num_preemptions == 0


def test_decode_takes_no_block_that_is_promised_to_a_prompt_under_way() -> None:
    """`b` computes a token per step and still lacks its third block when `a` needs its fourth: `b` has to go, for if
    `a` took the promised block, `b` would be stuck in the middle of its prompt."""
    bench = Bench(make_limits(num_blocks=6, max_num_seqs=2, max_num_batched_tokens=2), prefix_caching=False)
    bench.add("a", make_prompt(4), max_tokens=12)
    bench.add("b", make_prompt(12, first=20), max_tokens=1)
    for _ in range(10):
        bench.step()
    counts = bench.scheduler.counts()
    assert (counts.num_running, counts.blocks_used, counts.num_preemptions) == (2, 5, 0)
    assert shape(bench.step()) == [("a", 12, 1, True)]
    assert bench.scheduler.counts().num_preemptions == 1
    bench.run()
    assert bench.tokens["b"] == expected_tokens(make_prompt(12, first=20), 1)


def test_newest_request_is_preempted_and_recomputed_with_its_tokens_kept() -> None:
    bench = Bench(make_limits(num_blocks=4), prefix_caching=False)
    bench.add("old", make_prompt(7), max_tokens=9)
    bench.add("new", make_prompt(4, first=30), max_tokens=6)
    outputs = bench.run()
    assert bench.scheduler.counts().num_preemptions == 1
    recomputed = [row for output in outputs for row in output.scheduled if row.request_id == "new" and row.start == 0]
    first, second = (len(row.token_ids) for row in recomputed)
    assert (first, second > 4) == (4, True)
    assert bench.tokens["old"] == expected_tokens(make_prompt(7), 9)
    assert bench.tokens["new"] == expected_tokens(make_prompt(4, first=30), 6)


def test_preempted_request_goes_before_those_that_never_ran() -> None:
    bench = Bench(make_limits(num_blocks=4), prefix_caching=False)
    bench.add("old", make_prompt(7), max_tokens=9)
    bench.add("new", make_prompt(4, first=30), max_tokens=6)
    bench.step()
    bench.add("latest", make_prompt(4, first=40), max_tokens=1)
    order = [row.request_id for output in bench.run() for row in output.scheduled if row.start == 0]
    assert order == ["new", "latest"]


def test_stop_token_ends_a_request_but_not_before_min_tokens() -> None:
    tokens = expected_tokens(make_prompt(5), 8)
    stop = tokens[0]
    want_later = next((index + 1 for index, token in enumerate(tokens) if index >= 1 and token == stop), 8)
    bench = Bench(make_limits())
    bench.add("a", make_prompt(5), max_tokens=8, stop=(stop,))
    bench.run()
    assert (bench.tokens["a"], bench.finish["a"]) == ([stop], "stop")
    again = Bench(make_limits())
    again.scheduler.add("a", make_prompt(5), make_sampling(8, stop=(stop,), min_tokens=2), arrival_time=0.0)
    again.tokens["a"] = []
    again.run()
    assert again.tokens["a"] == tokens[:want_later]


def test_cached_prefix_is_not_computed_again() -> None:
    bench = Bench(make_limits())
    bench.add("a", make_prompt(12), max_tokens=2)
    bench.run()
    bench.add("b", make_prompt(14), max_tokens=2)
    assert shape(bench.step()) == [("b", 12, 2, True)]
    counts = bench.scheduler.counts()
    assert (counts.prefix_queries_tokens, counts.prefix_hits_tokens) == (26, 12)


@pytest.mark.parametrize(("length", "want_cached"), [(7, 4), (8, 4), (9, 8)])
def test_hit_never_covers_the_whole_prompt(length: int, want_cached: int) -> None:
    bench = Bench(make_limits())
    bench.add("a", make_prompt(12), max_tokens=1)
    bench.run()
    bench.add("b", make_prompt(length), max_tokens=3)
    assert shape(bench.step()) == [("b", want_cached, length - want_cached, True)]
    bench.run()
    assert bench.tokens["b"] == expected_tokens(make_prompt(length), 3)


def test_cached_blocks_that_nobody_holds_count_as_taken_when_they_are_shared() -> None:
    """`c` would find 2 of its 3 blocks in the cache; sharing these leaves none for the third."""
    bench = Bench(make_limits(num_blocks=4))
    bench.add("a", make_prompt(8), max_tokens=1)
    bench.run()
    bench.add("b", make_prompt(5, first=30), max_tokens=3)
    bench.step()
    bench.add("c", make_prompt(9), max_tokens=1)
    assert shape(bench.step()) == [("b", 5, 1, True)]
    assert bench.scheduler.counts().blocks_waiting == 1
    assert bench.scheduler.counts().num_waiting == 1
    bench.run()
    assert bench.tokens["c"] == expected_tokens(make_prompt(9), 1)


def test_requests_of_one_step_share_a_prefix_at_once() -> None:
    bench = Bench(make_limits())
    bench.add("a", make_prompt(9))
    bench.add("b", [*make_prompt(8), 49])
    assert shape(bench.step()) == [("b", 8, 1, True), ("a", 0, 9, True)]
    assert bench.scheduler.counts().blocks_used == 4
    bench.run()
    assert bench.tokens["b"] == expected_tokens([*make_prompt(8), 49], 4)


def test_waiting_blocks_count_a_shared_prefix_once_and_cached_blocks_not_at_all() -> None:
    bench = Bench(make_limits(num_blocks=8))
    bench.add("a", make_prompt(8), max_tokens=24)
    bench.step()
    bench.add("first", [*make_prompt(8), *make_prompt(13, first=20)])
    bench.add("second", [*make_prompt(8), *make_prompt(12, first=20), 49, 48])
    # Each has 6 blocks; 2 are a's, the 3 behind them are the same, the partial last one is private.
    assert bench.scheduler.counts().blocks_waiting == 3 + 2
    bench.scheduler.check_integrity()


def test_abort_works_in_every_state_and_frees_at_once() -> None:
    bench = Bench(make_limits(num_blocks=4), prefix_caching=False)
    bench.add("running", make_prompt(7), max_tokens=9)
    bench.step()
    bench.add("waiting", make_prompt(16, first=20), max_tokens=1)
    for request_id in ("waiting", "running"):
        assert bench.scheduler.abort(request_id)
        bench.scheduler.check_integrity()
        assert not bench.scheduler.abort(request_id)
    counts = bench.scheduler.counts()
    assert (counts.num_running, counts.num_waiting, counts.blocks_used) == (0, 0, 0)
    assert not bench.scheduler.has_work


def test_blocks_of_an_aborted_request_stay_fenced_while_its_step_is_in_flight() -> None:
    bench = Bench(make_limits(num_blocks=4, max_num_batched_tokens=16), prefix_caching=False)
    bench.add("gone", make_prompt(16), max_tokens=1)
    in_flight = bench.schedule()
    assert in_flight is not None
    bench.scheduler.abort("gone")
    bench.add("next", make_prompt(16, first=20), max_tokens=1)
    assert bench.schedule() is None
    bench.take(bench.scheduler.update(in_flight, bench.runner.execute(in_flight)))
    assert shape(bench.step()) == [("next", 0, 16, True)]
    assert bench.tokens == {"gone": [], "next": expected_tokens(make_prompt(16, first=20), 1)}


def test_fence_of_a_later_step_outlives_an_earlier_one() -> None:
    bench = Bench(make_limits(num_blocks=2), prefix_caching=False)
    bench.add("a", make_prompt(4), max_tokens=4)
    first, second = bench.schedule(), bench.schedule()
    assert first is not None
    assert second is not None
    bench.scheduler.abort("a")
    bench.add("b", make_prompt(5, first=20), max_tokens=1)
    bench.take(bench.scheduler.update(first, bench.runner.execute(first)))
    assert bench.schedule() is None
    bench.take(bench.scheduler.update(second, bench.runner.execute(second)))
    assert shape(bench.step()) == [("b", 0, 5, True)]


def test_blocks_on_their_way_back_save_others_from_preemption() -> None:
    """`gone` is aborted while its step runs: `b`, short of a block, sits one step out and keeps what it has."""
    bench = Bench(make_limits(num_blocks=5), prefix_caching=False)
    bench.add("a", make_prompt(3), max_tokens=8)
    bench.add("b", make_prompt(3, first=20), max_tokens=8)
    bench.add("gone", make_prompt(5, first=40), max_tokens=8)
    bench.step()
    in_flight = bench.schedule()
    assert in_flight is not None
    bench.scheduler.abort("gone")
    overlapped = bench.schedule()
    assert shape(overlapped) == [("a", 4, 1, True)]
    assert bench.scheduler.counts().num_preemptions == 0
    for output in (in_flight, overlapped):
        assert output is not None
        bench.take(bench.scheduler.update(output, bench.runner.execute(output)))
    assert shape(bench.step()) == [("a", 5, 1, True), ("b", 4, 1, True)]


def test_nothing_is_scheduled_beyond_max_tokens_while_a_step_is_in_flight() -> None:
    bench = Bench(make_limits())
    bench.add("a", make_prompt(3), max_tokens=1)
    first = bench.schedule()
    assert first is not None
    assert bench.schedule() is None
    bench.take(bench.scheduler.update(first, bench.runner.execute(first)))
    assert bench.finish == {"a": "length"}


def test_overlapped_step_takes_a_placeholder_and_drops_one_stale_token() -> None:
    stop = expected_tokens(make_prompt(3), 1)[0]
    bench = Bench(make_limits())
    bench.add("a", make_prompt(3), max_tokens=5, stop=(stop,))
    first = bench.schedule()
    second = bench.schedule()
    assert first is not None
    assert second is not None
    assert second.scheduled[0].token_ids == (-1,)
    with pytest.raises(SchedulerError, match="in flight"):
        bench.schedule()
    bench.take(bench.scheduler.update(first, bench.runner.execute(first)))
    assert bench.finish == {"a": "stop"}
    assert bench.scheduler.has_work  # its last step is still to come
    assert bench.scheduler.counts().blocks_used == 1
    assert bench.scheduler.update(second, bench.runner.execute(second)) == []
    assert bench.tokens["a"] == [stop]
    assert bench.scheduler.counts().blocks_used == 0
    assert not bench.scheduler.has_work


@pytest.mark.parametrize(
    ("case", "prompt", "max_tokens", "want"),
    [
        ("empty prompt", 0, 1, "at least 1 prompt token"),
        ("no tokens wanted", 3, 0, "max_tokens of at least 1"),
        ("longer than the context", 60, 5, "65 tokens with max_tokens; the limit is 64"),
        ("more blocks than there are", 30, 12, "need 11 blocks; there are 10"),
    ],
)
def test_request_that_can_never_run_is_refused_with_the_numbers(
    case: str, prompt: int, max_tokens: int, want: str
) -> None:
    bench = Bench(make_limits(num_blocks=10))
    with pytest.raises(RequestRefused, match=want):
        bench.scheduler.add("a", make_prompt(prompt), make_sampling(max_tokens), arrival_time=0.0)
    assert not bench.scheduler.has_work, case
    assert bench.scheduler.counts().num_added == 1


def test_request_of_exactly_the_limit_runs() -> None:
    bench = Bench(make_limits(num_blocks=10))
    bench.add("a", make_prompt(30), max_tokens=11)
    bench.run()
    assert bench.tokens["a"] == expected_tokens(make_prompt(30), 11)


def test_protocol_errors_are_loud() -> None:
    bench = Bench(make_limits())
    bench.add("a", make_prompt(3))
    with pytest.raises(SchedulerError, match="in use"):
        bench.scheduler.add("a", make_prompt(3), make_sampling(), arrival_time=0.0)
    output = bench.schedule()
    assert output is not None
    with pytest.raises(SchedulerError, match="drew no token for request a"):
        bench.scheduler.update(output, StepResult({}))
    with pytest.raises(SchedulerError, match="not the oldest in flight"):
        bench.scheduler.update(output, StepResult({"a": 1}))


def test_requests_that_nothing_moves_are_an_error_not_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(make_limits())
    scheduler.add("a", make_prompt(3), make_sampling(), arrival_time=0.0)
    monkeypatch.setattr(BlockTables, "missing", lambda *_args, **_kwargs: 1)
    with pytest.raises(SchedulerError, match="0 running and 1 waiting requests, none can move"):
        scheduler.schedule(0.0)


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_waiting"])
def test_limits_below_one_are_refused(name: str) -> None:
    least = ("num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    values: dict[str, Any] = dict.fromkeys(least, 1) | {name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0"):
        SchedulerLimits(**values)


def test_budget_below_the_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="below max_num_seqs 5"):
        make_limits(max_num_seqs=5, max_num_batched_tokens=4)


def test_rules_that_look_back_get_the_tokens_so_far_in_rows_and_forks() -> None:
    looking = SamplingParams(max_tokens=3, repetition_penalty=1.5)
    blind = SamplingParams(max_tokens=3)
    bench = Bench(make_limits(max_num_batched_tokens=4))
    bench.scheduler.add_group(["a", "b", "c"], make_prompt(5), [looking, blind, looking], arrival_time=0.0)
    bench.tokens |= {"a": [], "b": [], "c": []}
    chunk, first = bench.schedule(), None
    assert chunk is not None
    assert chunk.scheduled[0].history is None  # draws nothing
    bench.take(bench.scheduler.update(chunk, bench.runner.execute(chunk)))
    first = bench.schedule()
    assert first is not None
    (row,) = first.scheduled
    assert row.history is not None
    assert (list(row.history.token_ids), row.history.num_prompt) == (make_prompt(5), 5)
    assert [fork.history is not None for fork in row.forks] == [False, True]
    bench.take(bench.scheduler.update(first, bench.runner.execute(first)))
    second = bench.schedule()
    assert second is not None
    seen = {row.request_id: row.history and list(row.history.token_ids[5:]) for row in second.scheduled}
    assert seen == {"a": bench.tokens["a"], "b": None, "c": bench.tokens["c"]}


def test_logprobs_reach_the_request_that_they_belong_to() -> None:
    bench = Bench(make_limits())
    bench.add("a", make_prompt(3))
    output = bench.schedule()
    assert output is not None
    logprobs = TokenLogprobs(-0.5, 1, ())
    (new,) = bench.scheduler.update(output, StepResult({"a": 7}, {"a": logprobs}))
    assert (new.token_ids, new.logprobs) == ([7], [logprobs])
