"""Cancellation in every state, at every step boundary: frees everything within one step, disturbs nobody."""

import pytest

from pagefleet_server.core.step import SchedulerOutput
from support.kv_memory_runner import expected_tokens
from support.scheduling import Bench, make_limits, make_prompt

REQUESTS = {
    "early": (make_prompt(9), 8),
    "chunked": (make_prompt(15, first=20), 6),
    "preempted": (make_prompt(7, first=30), 9),
    "waiting": (make_prompt(12, first=40), 3),
}
NUM_BOUNDARIES = 40


def build(*, prefix_caching: bool) -> Bench:
    """Four requests of which each state is reached by some: chunks, decodes, preemption, a full house."""
    limits = make_limits(num_blocks=8, max_num_seqs=3, max_num_batched_tokens=6, max_model_len=32)
    bench = Bench(limits, prefix_caching=prefix_caching)
    for request_id, (prompt, max_tokens) in REQUESTS.items():
        bench.add(request_id, prompt, max_tokens)
    return bench


def test_the_scenario_reaches_every_state() -> None:
    bench = build(prefix_caching=False)
    outputs = bench.run()
    rows = [row for output in outputs for row in output.scheduled]
    assert bench.scheduler.counts().num_preemptions >= 1
    assert any(not row.sample for row in rows)
    assert any(0 < output.num_decodes < len(output.scheduled) for output in outputs)
    assert len(outputs) < NUM_BOUNDARIES


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("gone", REQUESTS)
def test_synchronous(gone: str, prefix_caching: bool) -> None:
    for boundary in range(NUM_BOUNDARIES):
        bench = build(prefix_caching=prefix_caching)
        for _ in range(boundary):
            if bench.scheduler.has_work:
                bench.step()
        was_live = gone not in bench.finish
        held_by_others = bench.scheduler.counts().blocks_used
        assert bench.scheduler.abort(gone) is was_live
        bench.scheduler.check_integrity()
        assert bench.scheduler.counts().blocks_used <= held_by_others
        bench.run()
        check_survivors(bench, gone, was_live=was_live)


@pytest.mark.parametrize("gone", REQUESTS)
@pytest.mark.parametrize("between_updates", [False, True])
def test_overlapped(gone: str, between_updates: bool) -> None:
    """With one step in flight (or two planned, when not between updates) it takes one step more."""
    for boundary in range(NUM_BOUNDARIES):
        bench = build(prefix_caching=True)
        in_flight: list[SchedulerOutput] = []
        aborted = was_live = False
        for index in range(200):
            output = bench.schedule()
            if output is not None:
                in_flight.append(output)
            if index == boundary and not between_updates:
                aborted, was_live = True, bench.scheduler.abort(gone)
                bench.scheduler.check_integrity()
            if len(in_flight) == 2 or (output is None and in_flight):
                oldest = in_flight.pop(0)
                bench.take(bench.scheduler.update(oldest, bench.runner.execute(oldest)))
                bench.scheduler.check_integrity()
            if index == boundary and between_updates:
                aborted, was_live = True, bench.scheduler.abort(gone)
                bench.scheduler.check_integrity()
            if aborted and not bench.scheduler.has_work:
                break
        check_survivors(bench, gone, was_live=was_live)


def check_survivors(bench: Bench, gone: str, *, was_live: bool) -> None:
    assert not bench.scheduler.has_work
    for request_id, (prompt, max_tokens) in REQUESTS.items():
        want = expected_tokens(prompt, max_tokens)
        if request_id == gone and was_live:
            assert bench.tokens[request_id] == want[: len(bench.tokens[request_id])]
            assert request_id not in bench.finish
        else:
            assert bench.tokens[request_id] == want
    counts = bench.scheduler.counts()
    assert (counts.blocks_used, counts.num_running, counts.num_waiting, counts.blocks_waiting) == (0, 0, 0, 0)
