"""How many replicas must stand ready for what load has done before."""

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet_operator.autoscale import decide
from pagefleet_operator.fleet_metrics import RULES
from pagefleet_operator.history import History
from pagefleet_operator.model import ScalingPolicy, ScalingRules, Slo
from pagefleet_operator.standing import (
    HALF_LIFE_SECONDS,
    MAX_STEPS,
    STEP_SECONDS,
    Shadow,
    Standing,
    ordered_in_time,
)
from support.operator_objects import autoscaling, fleet, sample

ALLOWED = 0.05
SLO = Slo(time_to_first_token_ms=500)
NO_WINDOW = ScalingRules(0, "Max", (ScalingPolicy("Percent", 100, 15),))


def learn(
    demands: Iterable[float],
    standing: Standing | None = None,
    *,
    start: float = 110.0,
    most: int = 16,
    now: float = 0.0,
    allowed: float = ALLOWED,
) -> Standing:
    """One step of STEP_SECONDS for each demand, without a forecast."""
    standing = standing or Standing()
    for step, demand in enumerate([*demands, 0.0]):
        standing = standing.observed(
            demand,
            demand,
            now=now + step * STEP_SECONDS,
            start_seconds=start,
            window_seconds=300.0,
            late_seconds=3.0,
            allowed=allowed,
            most=most,
        )
    return standing


def on_off(low: float, high: float, times: int = 2) -> list[float]:
    """15 minutes low, 10 minutes high."""
    return ([low] * 90 + [high] * 60) * times


def test_steady_load_needs_nothing_beyond_the_minimum() -> None:
    assert learn([0.9] * 500).replicas == 1


def test_a_load_that_rises_no_faster_than_replicas_start_needs_nothing() -> None:
    slow = [step / 200 for step in range(800)]
    assert learn(slow, start=30.0).replicas == 1


def test_a_days_curve_is_no_jump() -> None:
    """Replicas with their margin would have come late for its steeper parts: the fleet as it is did not."""
    curve = [1.0 - 0.8 * math.cos(2 * math.pi * step / 360) for step in range(720)]
    coming = [*curve[11:], *curve[:11]]
    learnt = Standing()
    for step, demand in enumerate(curve):
        learnt = learnt.observed(
            demand,
            max(demand, coming[step]),
            now=step * STEP_SECONDS,
            start_seconds=110.0,
            window_seconds=300.0,
            late_seconds=3.0,
            allowed=ALLOWED,
            most=16,
        )
    assert learnt.replicas == 1
    assert learnt.shadows[0].replicas == 0 and learnt.shadows[0].late == 0


@pytest.mark.parametrize(("start", "want"), [(0.0, 1), (110.0, 3), (600.0, 3)])
def test_a_burst_that_came_before_is_met_by_what_it_needed_then(start: float, want: int) -> None:
    assert learn(on_off(0.4, 2.3), start=start).replicas == want


@given(st.lists(st.floats(0, 20), max_size=80), st.floats(0, 300), st.floats(0, 300))
def test_a_slower_start_never_needs_fewer(demands: list[float], start: float, longer: float) -> None:
    past = [0.0] * 60 + demands  # so that both know what was ordered before
    assert learn(past, start=start + longer).replicas >= learn(past, start=start).replicas


@given(st.lists(st.floats(0, 50), max_size=80), st.integers(1, 40), st.floats(0, 1))
def test_the_count_is_one_that_there_can_be(demands: list[float], most: int, allowed: float) -> None:
    assert 1 <= learn(demands, most=most, allowed=allowed).replicas <= most


def test_the_first_requests_prove_nothing() -> None:
    assert learn([0.1] * 5 + [1.2] + [0.1] * 5).replicas == 1


def test_a_load_that_no_count_could_serve_keeps_no_more_than_helps() -> None:
    """Four replicas are all that there can be, and a flood is late with any of them."""
    assert learn([0.1] * 10 + [1000.0] * 10 + [0.1] * 200, most=4).replicas == 1


def test_a_rare_burst_is_forgotten() -> None:
    learnt = learn(on_off(0.4, 2.3), most=3)
    assert learnt.replicas == 3
    days = int(4 * HALF_LIFE_SECONDS / STEP_SECONDS)
    assert learn([0.5] * days, learnt, most=3, now=1e6).replicas == 1


HOUR = int(3600 / STEP_SECONDS)
SPIKE = [0.5] * 60 + [3.0] * 30 + [0.5] * 60


def test_after_a_single_jump_another_is_awaited_for_an_hour() -> None:
    """Kept until it was a small part of all requests, it held three replicas for seventeen hours."""
    learnt = learn(SPIKE)
    assert learnt.replicas == 4
    soon = learn([0.5] * (HOUR // 2), learnt, now=1500.0)
    assert soon.replicas == 4
    assert learn([0.5] * HOUR, soon, now=1500.0 + HOUR / 2 * STEP_SECONDS).replicas == 1


def test_what_came_after_some_quiet_is_awaited_for_twice_as_long() -> None:
    apart = [0.5] * (3 * HOUR)
    learnt = learn([*SPIKE, *apart, *SPIKE])
    assert learnt.replicas == 4, "what was learnt of the first is not lost"
    later = learn([0.5] * (5 * HOUR), learnt, now=1e6)
    assert later.replicas == 4
    assert learn([0.5] * (3 * HOUR), later, now=1e6 + 5 * 3600).replicas == 1


@given(st.lists(st.floats(0, 20), max_size=60), st.floats(0, 600))
def test_quiet_is_never_negative_and_ends_with_a_jump(demands: list[float], start: float) -> None:
    learnt = learn([0.0] * 70 + demands, start=start)
    assert 0 <= learnt.quiet <= 70 + len(demands)
    assert 0 <= learnt.longest_quiet <= 70 + len(demands)
    assert [shadow.replicas for shadow in learnt.shadows[:2]] in ([], [0, 1])
    late = [shadow.late for shadow in learnt.shadows[1:]]
    assert late == sorted(late, reverse=True), "the smallest is late whenever another one is"
    if learnt.shadows and learnt.shadows[0].late == 0:
        assert learnt.longest_quiet == 0, "nothing was late, so no quiet has ended"


def test_the_count_does_not_waver() -> None:
    """Just inside the limit the larger count stays; well inside it goes."""
    seen = 1000.0 - 60.0
    for count in (0, 1):
        others = (Shadow(1, late=99.0), Shadow(2))[count:]
        near = Standing(replicas=2, seen=seen, shadows=(Shadow(count, late=24.0), *others))
        far = Standing(replicas=2, seen=seen, shadows=(Shadow(count, late=19.0), *others))
        fresh = Standing(replicas=1, seen=seen, shadows=(Shadow(count, late=24.0), *others))
        assert [standing.needed(ALLOWED) for standing in (near, far, fresh)] == [2, 1, 1]


def test_a_silence_begins_the_replay_anew_and_keeps_what_was_learnt() -> None:
    learnt = learn(on_off(0.4, 2.3))
    later = learn([0.1], learnt, now=1e6)
    assert later.replicas == learnt.replicas
    assert later.orders == (0.1,)
    earlier = learn([0.1], learnt, now=-1e6)
    assert (earlier.replicas, earlier.orders) == (learnt.replicas, (0.1,))


def test_a_load_that_was_there_before_the_operator_is_no_jump() -> None:
    """Five replicas serve five replicas' load; a new operator must not take it for a burst out of nothing."""
    assert learn([4.0] * 200, start=240.0).replicas == 1


def test_memory_is_bounded() -> None:
    learnt = learn([1.0] * 3000, start=1e9, most=1000)
    assert len(learnt.orders) <= MAX_STEPS
    assert len(learnt.shadows) <= 48


def test_what_a_fleet_that_only_follows_has_ready() -> None:
    assert ordered_in_time([1, 5, 5, 5], start=3, window=2) == 1, "ordered, and not ready yet"
    assert ordered_in_time([1, 5, 5, 5, 5], start=3, window=2) == 5
    assert ordered_in_time([5, 1, 1], start=1, window=2) == 5, "kept for the window"
    assert ordered_in_time([5, 1, 1, 1, 1], start=1, window=2) == 1


class TestDecision:
    """What the decision makes of it."""

    history = History(standing=Standing(replicas=3))
    idle = fleet(4, *[sample()] * 4)

    def test_what_must_stand_ready_stays(self) -> None:
        decision = decide(autoscaling(scale_down=NO_WINDOW, slo=SLO), self.idle, self.history, 0.0)
        assert (decision.replicas, decision.reason) == (3, "Standing")
        assert decision.message.endswith("wanted: KVBlocks 1, Standing 3")
        assert set(decision.inputs.wants) <= set(RULES), "each rule that wins is counted"

    def test_what_load_needs_is_told_apart(self) -> None:
        """So that what only stands ready can be given back first under a budget of devices."""
        decision = decide(autoscaling(scale_down=NO_WINDOW, slo=SLO), self.idle, self.history, 0.0)
        assert (decision.unbudgeted, decision.needed) == (3, 1)
        busy = fleet(4, *[sample(used=70)] * 4)
        spec = autoscaling(slo=SLO)
        lately = decide(spec, busy, self.history, 0.0)
        history = lately.history
        for now in range(8, 400, 8):
            history = decide(spec, self.idle, history, float(now)).history
        assert (lately.unbudgeted, lately.needed) == (4, 4)
        assert decide(spec, self.idle, lately.history, 9.0).needed == 4, "needed within the scale-down window"
        assert decide(spec, self.idle, history, 400.0).needed == 1
        given = decide(spec, self.idle, lately.history, 9.0, allowance=1)
        assert (given.replicas, given.limited_by) == (1, "DeviceBudget")

    def test_without_an_objective_nothing_must(self) -> None:
        assert decide(autoscaling(scale_down=NO_WINDOW), self.idle, self.history, 0.0).replicas == 1

    def test_never_above_the_maximum(self) -> None:
        spec = autoscaling(maximum=2, scale_down=NO_WINDOW, slo=SLO)
        decision = decide(spec, self.idle, self.history, 0.0)
        assert (decision.replicas, decision.limited_by) == (2, None)

    def test_it_learns_from_rounds_in_which_every_pod_answers(self) -> None:
        spec = autoscaling(slo=SLO)
        history = History()
        for now in range(0, 300, 2):
            history = decide(spec, fleet(1, sample(used=60)), history, float(now)).history
        seen = history.standing.seen
        assert seen == pytest.approx(0.75 * 18, rel=1e-3), "29 steps but the 11 of a start-up"
        for now in range(300, 400, 2):
            history = decide(spec, fleet(2, sample(used=60), None), history, float(now)).history
        assert history.standing.seen == seen

    def test_a_burst_leaves_its_count_behind(self) -> None:
        """Half as much again as one replica carries for ten minutes; afterwards two stay, without the objective one."""
        counts = []
        for slo in (SLO, None):
            spec, history, replicas = autoscaling(scale_down=NO_WINDOW, slo=slo), History(), 1
            for now in range(0, 3000, 2):
                load = 120 if 600 <= now < 1200 else 8
                share = sample(
                    used=min(100, load // replicas), waiting_blocks=max(0, load - 100 * replicas) // replicas
                )
                decision = decide(spec, fleet(replicas, *[share] * replicas), history, float(now))
                history, replicas = decision.history, decision.replicas
            counts.append(replicas)
        assert counts == [2, 1]
