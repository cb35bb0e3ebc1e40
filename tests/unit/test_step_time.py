"""The step-time model learns, forgets, ignores accidents, and cuts chunks to fit."""

import random

import pytest

from pagefleet_server.core.chunk_policy import MAX_STRETCH, MIN_CHUNK_TOKENS, PROMPT_WEIGHT
from pagefleet_server.core.step_time import MIN_STEPS, StepTimeModel, StepWork
from support.scheduling import Bench, make_limits, make_prompt


def true_seconds(work: StepWork, *, slowdown: float = 1.0) -> float:
    return slowdown * (0.005 + 0.0004 * work.num_tokens + 2e-8 * work.num_pairs)


def some_work(rng: random.Random) -> StepWork:
    work = StepWork(0, 0)
    for _ in range(rng.randint(1, 16)):
        work = work.with_chunk(rng.randint(0, 4000), 1)
    if rng.random() < 0.5:
        work = work.with_chunk(rng.randint(0, 4000), rng.randint(1, 500))
    return work


def trained(*, noise: float = 0.1, steps: int = 300) -> StepTimeModel:
    rng = random.Random(1)
    model = StepTimeModel()
    for _ in range(steps):
        work = some_work(rng)
        model.observe(work, true_seconds(work) * rng.uniform(1 - noise, 1 + noise))
    return model


def test_work_counts_every_pair_of_query_and_context_token() -> None:
    work = StepWork(0, 0).with_chunk(3, 1).with_chunk(10, 4)
    assert work == StepWork(5, 4 + 11 + 12 + 13 + 14)


def test_nothing_is_predicted_before_enough_steps() -> None:
    model = StepTimeModel()
    for _ in range(MIN_STEPS):
        assert model.predict(StepWork(1, 1)) is None
        assert model.largest_chunk(StepWork(1, 1), 0, 1.0) is None
        model.observe(StepWork(1, 1), 0.01)
    assert model.predict(StepWork(1, 1)) == pytest.approx(0.01, rel=0.01)


def test_predictions_are_close_after_noisy_steps() -> None:
    model, rng = trained(), random.Random(2)
    for _ in range(100):
        work = some_work(rng)
        assert model.predict(work) == pytest.approx(true_seconds(work), rel=0.15)


def test_slower_machine_is_noticed_and_one_accident_is_not() -> None:
    model, rng = trained(), random.Random(3)
    work = StepWork(100, 50_000)
    model.observe(work, 30.0)
    assert model.predict(work) == pytest.approx(true_seconds(work), rel=0.3)
    for _ in range(800):
        step = some_work(rng)
        model.observe(step, true_seconds(step, slowdown=3.0))
    assert model.predict(work) == pytest.approx(true_seconds(work, slowdown=3.0), rel=0.1)


def test_thousands_of_equal_steps_do_not_blow_up_what_they_say_nothing_about() -> None:
    model = trained(noise=0.0)
    for _ in range(160_000):  # forgetting at every step would overflow a double after 142,000
        model.observe(StepWork(16, 16_000), true_seconds(StepWork(16, 16_000)))
    work = StepWork(16, 16_000).with_chunk(1000, 200)
    assert model.predict(work) == pytest.approx(true_seconds(work), rel=0.25)


@pytest.mark.parametrize("start", [0, 500, 4000])
@pytest.mark.parametrize("max_seconds", [0.03, 0.1, 0.5])
def test_largest_chunk_just_fits(start: int, max_seconds: float) -> None:
    model, work = trained(noise=0.0), StepWork(16, 16_000)
    count = model.largest_chunk(work, start, max_seconds)
    assert count is not None
    fits, too_long = (model.predict(work.with_chunk(start, c)) for c in (count, count + 2))
    assert fits is not None
    assert too_long is not None
    assert fits <= max_seconds < too_long


def test_nothing_fits_when_the_time_is_already_used() -> None:
    assert trained().largest_chunk(StepWork(500, 0), 0, 0.05) == 0


def run_steps(bench: Bench, count: int, *, overhead: float = 0.0) -> list[int]:
    """Steps that take what true_seconds says, and the overhead; gives the prompt tokens of each."""
    chunks = []
    for _ in range(count):
        output = bench.scheduler.schedule(bench.now)
        assert output is not None
        work = StepWork(0, 0)
        for row in output.scheduled:
            work = work.with_chunk(row.start, len(row.token_ids))
        result = bench.runner.execute(output)
        bench.take(bench.scheduler.update(output, result, step_seconds=overhead + true_seconds(work)))
        bench.scheduler.check_integrity()
        chunks.append(sum(len(row.token_ids) for row in output.scheduled[output.num_decodes :]))
    return chunks


def smooth_bench(
    max_step_seconds: float | None, *, overhead: float = 0.0, max_num_seqs: int = 8, num_streams: int = 4
) -> Bench:
    """Streams that decode, and a long prompt that comes."""
    bench = Bench(
        make_limits(
            num_blocks=800,
            max_model_len=3000,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=512,
            max_step_seconds=max_step_seconds,
        )
    )
    for index in range(num_streams):
        bench.add(f"stream{index}", make_prompt(20, first=index), max_tokens=1000)
    run_steps(bench, 20, overhead=overhead)
    bench.add("long", make_prompt(1500, first=20), max_tokens=1)
    return bench


def fitting(seconds: float, num_streams: int = 4) -> float:
    """Tokens beside so many streams, attention left out."""
    return (seconds - 0.005) / 0.0004 - num_streams


def test_long_prompt_beside_streams_is_cut_by_time() -> None:
    chunks = run_steps(smooth_bench(0.05), 8)
    # About 110 tokens fit into 50 ms, once a first chunk has taught what a token costs.
    assert all(0.8 * fitting(0.05) <= chunk <= 1.02 * fitting(0.05) for chunk in chunks[1:])


@pytest.mark.parametrize(("num_streams", "num_prompts"), [(4, 1), (3, 1), (2, 1), (3, 2), (1, 1), (2, 3), (1, 2)])
def test_the_bound_stretches_where_there_are_fewer_than_four_streams_to_one_prompt(
    num_streams: int, num_prompts: int
) -> None:
    """Whether they are under way or wait with a seat for them."""
    bench = smooth_bench(0.03, num_streams=num_streams)
    for index in range(num_prompts - 1):
        bench.add(f"long{index}", make_prompt(1500, first=21 + index), max_tokens=1)
    most = fitting(0.03 * min(MAX_STRETCH, PROMPT_WEIGHT * num_prompts / num_streams), num_streams)
    assert all(0.8 * most <= chunk <= 1.02 * most for chunk in run_steps(bench, 3)[1:])


@pytest.mark.parametrize(("max_num_seqs", "stretch"), [(6, 2.0), (20, MAX_STRETCH)])
def test_the_bound_stretches_for_prompts_with_a_seat_up_to_its_limit(max_num_seqs: int, stretch: float) -> None:
    bench = smooth_bench(0.015, max_num_seqs=max_num_seqs)
    for index in range(30):
        bench.add(f"long{index}", make_prompt(1500, first=21 + index), max_tokens=1)
    most = fitting(0.015 * stretch)
    assert all(0.8 * most <= chunk <= 1.02 * most for chunk in run_steps(bench, 4)[1:])


def test_with_more_streams_to_a_prompt_the_bound_holds() -> None:
    bench = smooth_bench(0.05, num_streams=7)
    assert all(chunk <= fitting(0.05, 7) * 1.02 for chunk in run_steps(bench, 4)[1:])


def test_without_a_bound_or_without_streams_only_the_budget_cuts() -> None:
    assert run_steps(smooth_bench(None), 1) == [508]
    bench = smooth_bench(0.05)
    for index in range(4):
        bench.scheduler.abort(f"stream{index}")
    assert run_steps(bench, 1) == [512]


def test_prompts_get_as_much_time_as_the_streams_need_alone() -> None:
    bench = smooth_bench(0.01, overhead=0.05)
    # Streams alone take about 55 ms, far over the bound of 10: 55 ms more is about 137 tokens.
    assert all(110 <= chunk <= 145 for chunk in run_steps(bench, 8, overhead=0.05)[1:])


def test_tiny_bound_still_lets_a_prompt_in() -> None:
    bench = smooth_bench(0.000001)
    chunks = run_steps(bench, 5)
    assert all(chunk >= min(MIN_CHUNK_TOKENS, 14) for chunk in chunks)
    run_steps(bench, 100)
    assert len(bench.tokens["long"]) == 1
