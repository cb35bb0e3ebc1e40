"""Log-probabilities of prompts: each token once, in order, few rows per step, whatever happens on the way."""

from typing import Any

import pytest

from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.scheduler import MAX_SCORED_TOKENS, RequestRefused, SchedulerError
from pagefleet_server.core.step import StepResult
from support.kv_memory_runner import expected_scores, expected_tokens
from support.scheduling import Bench, make_limits, make_prompt, make_sampling, shape

SCORED = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=0)


def make_bench(**limits: int) -> Bench:
    values: dict[str, Any] = {"num_blocks": 128, "max_model_len": 512, "max_num_batched_tokens": 256, **limits}
    return Bench(make_limits(**values))


def add_scored(bench: Bench, request_id: str, prompt: list[int]) -> None:
    bench.scheduler.add(request_id, prompt, SCORED, arrival_time=bench.now)
    bench.tokens[request_id] = []


@pytest.mark.parametrize("length", [1, 2, 5, MAX_SCORED_TOKENS, MAX_SCORED_TOKENS + 1, MAX_SCORED_TOKENS + 2, 200])
def test_every_token_but_the_first_is_scored_once_and_in_order(length: int) -> None:
    bench = make_bench()
    add_scored(bench, "a", make_prompt(length))
    outputs = bench.run()
    assert bench.scores["a"] == expected_scores(make_prompt(length))
    assert bench.tokens["a"] == expected_tokens(make_prompt(length), 3)
    assert all(sum(len(row.prompt_targets) for row in step.scheduled) <= MAX_SCORED_TOKENS for step in outputs)


def test_scored_prompt_misses_the_cache_but_fills_it() -> None:
    bench = make_bench()
    bench.add("before", make_prompt(20), max_tokens=1)
    bench.run()
    add_scored(bench, "scored", make_prompt(20))
    assert shape(bench.step()) == [("scored", 0, 20, True)]
    bench.run()
    bench.add("after", make_prompt(20), max_tokens=1)
    assert shape(bench.step()) == [("after", 16, 4, True)]


def test_several_scored_prompts_share_the_bound_of_a_step() -> None:
    bench = make_bench()
    prompts = {name: make_prompt(50, first=index) for index, name in enumerate("abc")}
    for name, prompt in prompts.items():
        add_scored(bench, name, prompt)
    assert shape(bench.step()) == [("a", 0, 50, True), ("b", 0, 15, False)]
    bench.run()
    assert bench.scores == {name: expected_scores(prompt) for name, prompt in prompts.items()}


def test_preemption_in_the_middle_scores_nothing_twice() -> None:
    bench = make_bench(num_blocks=26, max_num_seqs=2)
    bench.add("old", make_prompt(7, first=30), max_tokens=60)
    bench.step()
    add_scored(bench, "scored", make_prompt(80))
    bench.step()
    chat = SamplingParams(max_tokens=2)
    bench.scheduler.add("urgent", make_prompt(10, first=40), chat, arrival_time=0.0, priority=-1)
    bench.tokens["urgent"] = []
    again = [row for step in bench.run() for row in step.scheduled if row.request_id == "scored" and row.start == 0]
    # What was scored before costs no row of logits: the whole prompt fits into one step.
    assert [(len(row.token_ids), row.scored_from, len(row.prompt_targets)) for row in again] == [(80, 64, 15)]
    assert bench.scheduler.counts().num_preemptions >= 1
    assert bench.scores["scored"] == expected_scores(make_prompt(80))
    assert bench.tokens["scored"] == expected_tokens(make_prompt(80), 3)


def test_only_the_first_of_a_group_can_be_scored() -> None:
    bench = make_bench()
    with pytest.raises(RequestRefused, match="only the first"):
        bench.scheduler.add_group(["a", "b"], [1, 2], [make_sampling(), SCORED], arrival_time=0.0)
    bench.scheduler.add_group(["c", "d"], make_prompt(100), [SCORED, make_sampling(seed=1)], arrival_time=0.0)
    bench.tokens |= {"c": [], "d": []}
    bench.run()
    assert bench.scores["c"] == expected_scores(make_prompt(100))
    assert bench.scores["d"] == []
    assert bench.tokens["d"] == expected_tokens(make_prompt(100), 4, 1)


def test_aborted_leader_is_scored_no_further() -> None:
    bench = make_bench()
    bench.scheduler.add_group(["c", "d"], make_prompt(200), [SCORED, make_sampling(seed=1)], arrival_time=0.0)
    bench.tokens |= {"c": [], "d": []}
    bench.step()
    bench.scheduler.abort("c")
    assert shape(bench.step()) == [("c", 64, 136, True)]
    bench.run()
    assert bench.tokens["d"] == expected_tokens(make_prompt(200), 4, 1)


def test_scores_of_a_request_that_was_aborted_meanwhile_are_dropped() -> None:
    bench = make_bench()
    add_scored(bench, "a", make_prompt(5))
    output = bench.schedule()
    assert output is not None
    bench.scheduler.abort("a")
    assert bench.scheduler.update(output, bench.runner.execute(output)) == []


def test_missing_scores_are_an_error() -> None:
    bench = make_bench()
    add_scored(bench, "a", make_prompt(5))
    output = bench.schedule()
    assert output is not None
    with pytest.raises(SchedulerError, match="did not score the prompt of request a"):
        bench.scheduler.update(output, StepResult({"a": 1}))
