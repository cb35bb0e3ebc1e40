"""Embeddings in the scheduler: every prompt token's state is pooled once, nothing is drawn, nothing is shared."""

import struct
from collections.abc import Sequence

import pytest

from pagefleet_server.client.request_stream import merge_outputs
from pagefleet_server.core.limits import why_impossible
from pagefleet_server.core.request import FinishReason
from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.scheduler import Scheduler, SchedulerError
from pagefleet_server.core.step import SchedulerOutput, StepResult
from pagefleet_server.wire import RequestOutput
from support.scheduling import make_limits, make_prompt, make_sampling

MEAN = SamplingParams(max_tokens=1, pooling="mean")
LAST = SamplingParams(max_tokens=1, pooling="last")


def pooled(step: SchedulerOutput) -> StepResult:
    """A token's "state" is its id."""
    sums = {
        row.request_id: struct.pack("<f", sum(row.token_ids[index] for index in row.pooled_rows))
        for row in step.scheduled
        if row.pooled_rows
    }
    return StepResult(sampled={row.request_id: 0 for row in step.scheduled if row.sample}, pooled=sums)


def run(scheduler: Scheduler, *, at_most: int = 200) -> tuple[dict[str, list[float]], dict[str, FinishReason]]:
    """Parts of each request's sum, and how it ended; integrity is checked between the steps."""
    parts: dict[str, list[float]] = {}
    ends: dict[str, FinishReason] = {}
    for number in range(at_most):
        step = scheduler.schedule(float(number))
        if step is None:
            return parts, ends
        for news in scheduler.update(step, pooled(step)):
            if news.pooled is not None:
                parts.setdefault(news.request_id, []).append(struct.unpack("<f", news.pooled)[0])
            if news.finish_reason is not None:
                ends[news.request_id] = news.finish_reason
                assert news.token_ids == []
        scheduler.check_integrity()
    raise AssertionError("it does not end")


def add(scheduler: Scheduler, request_id: str, prompt: Sequence[int], sampling: SamplingParams = MEAN) -> None:
    scheduler.add(request_id, list(prompt), sampling, arrival_time=0.0)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 50, 64])
@pytest.mark.parametrize("sampling", [MEAN, LAST])
def test_every_state_counts_once_whatever_the_chunks(length: int, sampling: SamplingParams) -> None:
    scheduler = Scheduler(make_limits())
    prompt = make_prompt(length)
    add(scheduler, "a", prompt, sampling)
    parts, ends = run(scheduler)
    assert sum(parts["a"]) == (sum(prompt) if sampling is MEAN else prompt[-1])
    assert len(parts["a"]) == (-(-length // 16) if sampling is MEAN else 1)
    assert ends == {"a": FinishReason.LENGTH}
    assert not scheduler.has_work


def test_a_prompt_may_fill_the_whole_context() -> None:
    limits = make_limits(num_blocks=16, block_size=4, max_model_len=64)
    assert why_impossible([1] * 64, [MEAN], limits) is None
    assert "65 tokens" in str(why_impossible([1] * 65, [MEAN], limits))
    assert why_impossible([1] * 64, [make_sampling(1)], limits) is not None


def test_cached_blocks_are_not_used() -> None:
    """A state that is not computed cannot be pooled."""
    scheduler = Scheduler(make_limits())
    for name in ("first", "second"):
        add(scheduler, name, make_prompt(32))
        parts, _ = run(scheduler)
        assert sum(parts[name]) == sum(make_prompt(32))


def test_many_together_and_an_abort_leave_nothing_behind() -> None:
    scheduler = Scheduler(make_limits(num_blocks=24, max_num_seqs=3))
    prompts = {f"r{number}": make_prompt(7 * number + 1, first=number) for number in range(8)}
    for name, prompt in prompts.items():
        add(scheduler, name, prompt)
    scheduler.abort("r7")
    parts, ends = run(scheduler)
    assert {name: sum(found) for name, found in parts.items()} == {n: sum(p) for n, p in prompts.items() if n != "r7"}
    assert len(ends) == 7


def test_preemption_counts_nothing_twice() -> None:
    """A more important request takes the place of one that is half pooled."""
    scheduler = Scheduler(make_limits(num_blocks=14, max_num_seqs=2))
    scheduler.add("half", make_prompt(48), MEAN, arrival_time=0.0, priority=5)
    step = scheduler.schedule(0.0)
    assert step is not None
    (first,) = (news.pooled for news in scheduler.update(step, pooled(step)))
    assert first is not None
    scheduler.add("urgent", make_prompt(40, first=9), MEAN, arrival_time=1.0, priority=0)
    parts, _ = run(scheduler)
    assert scheduler.counts().num_preemptions == 1
    assert struct.unpack("<f", first)[0] + sum(parts["half"]) == sum(make_prompt(48))
    assert sum(parts["urgent"]) == sum(make_prompt(40, first=9))


def test_a_step_without_its_sum_is_a_fault() -> None:
    scheduler = Scheduler(make_limits())
    add(scheduler, "a", make_prompt(5))
    step = scheduler.schedule(0.0)
    assert step is not None
    with pytest.raises(SchedulerError, match="did not score"):
        scheduler.update(step, StepResult(sampled={"a": 0}))


def test_merged_outputs_keep_every_part() -> None:
    first, second = RequestOutput("a", [], pooled=[b"1", b"2"]), RequestOutput("a", [], pooled=[b"3"])
    assert merge_outputs(first, second).pooled == [b"1", b"2", b"3"]
