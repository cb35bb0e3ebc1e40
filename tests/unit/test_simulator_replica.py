"""One simulated pod: the server's own scheduler in virtual time."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagefleet_operator.fleet import Sample
from pagefleet_simulator.profile import Profile
from pagefleet_simulator.replica import Replica, Served
from pagefleet_simulator.workload import Arrival
from support.simulation import small_profile

Trace = tuple[list[tuple[int, float | None, float | None, float | None]], list[Sample], int]


def play(profile: Profile, arrivals: list[Arrival], *, skips: bool, scrape: float = 2.0) -> Trace:
    ended: list[Served] = []
    replica = Replica(profile, 0.0, lambda _, served: ended.append(served), skips=skips)
    samples: list[Sample] = []
    now = scrape
    for number, arrival in enumerate(arrivals):
        while now < arrival.time:
            replica.advance(now)
            samples.append(replica.sample(now))
            now += scrape
        replica.add(Served(number, arrival), arrival.time)
    replica.advance(1e9)
    samples.append(replica.sample(1e9))
    replica.scheduler.check_integrity()
    return (
        [(item.number, item.first_scheduled, item.first_token, item.ended) for item in ended],
        samples,
        replica.num_steps,
    )


ARRIVALS = st.lists(
    st.tuples(st.floats(0, 40), st.integers(1, 300), st.integers(1, 120), st.integers(0, 2)), min_size=1, max_size=40
).map(
    lambda rows: [
        Arrival(time, prompt, output, prefix=(1,) * piece, prefix_piece_tokens=32)
        for time, prompt, output, piece in sorted(rows)
    ]
)


SAME_PROMPTS = [
    Arrival(time, prompt, output, prefix=(1,) * piece, prefix_piece_tokens=32)
    for time, prompt, output, piece in ((0, 8, 9, 1), (1, 208, 49, 0), (2, 8, 11, 1), (2, 208, 1, 0), (2, 208, 1, 0))
]
"""The first and the third once came to the same text, and another block of the two was kept when steps were skipped."""


@settings(deadline=None, max_examples=40)
@example(SAME_PROMPTS, 44, None)
@given(ARRIVALS, st.integers(30, 80), st.sampled_from([None, 0.05]))
def test_skipped_steps_are_the_same_steps(arrivals: list[Arrival], blocks: int, max_step: float | None) -> None:
    """Every time and every gauge, with queues, preemptions and shared prefixes."""
    profile = small_profile(num_blocks=blocks, max_step_seconds=max_step)
    assert play(profile, arrivals, skips=True) == play(profile, arrivals, skips=False)


def test_a_lone_request_takes_what_the_step_model_says() -> None:
    profile = small_profile(prompt_pair_seconds=0.0, decode_pair_seconds=0.0)
    (row,), _, steps = play(profile, [Arrival(1.0, 100, 11)], skips=True)
    assert steps == 11
    assert row[2] == pytest.approx(1.0 + 0.02 + 100 * 0.001)
    assert row[3] == pytest.approx(1.0 + 0.12 + 10 * 0.021)


def test_a_full_queue_refuses() -> None:
    replica = Replica(small_profile(max_queue=2, max_num_seqs=1), 0.0, lambda _, __: None)
    taken = [replica.add(Served(number, Arrival(0.0, 50, 50)), 0.0) for number in range(5)]
    assert taken.count(False) >= 2
    assert taken[0]


def test_a_request_that_never_fits_is_refused() -> None:
    replica = Replica(small_profile(), 0.0, lambda _, __: None)
    assert not replica.add(Served(0, Arrival(0.0, 600, 10)), 0.0)


def test_a_crash_loses_what_was_served_and_nothing_else() -> None:
    ended: list[Served] = []
    replica = Replica(small_profile(), 0.0, lambda _, served: ended.append(served))
    replica.add(Served(0, Arrival(0.0, 10, 2)), 0.0)
    replica.advance(5.0)
    replica.add(Served(1, Arrival(5.0, 10, 100)), 5.0)
    assert [served.number for served in replica.fail(5.5)] == [1]
    assert [served.number for served in ended] == [0]
