"""Whatever is wrong with the input: a bounded, explained decision each time."""

import math
from dataclasses import replace

import pytest

from pagefleet_operator.autoscale import Decision, decide
from pagefleet_operator.demand import demand_of, turnover_seconds
from pagefleet_operator.errors import ScrapeError
from pagefleet_operator.fleet import Fleet, FleetPod, PodState
from pagefleet_operator.history import Bucket, Change, History
from pagefleet_operator.latency import Histogram, Latencies, LatencyWindow
from pagefleet_operator.memory import restore_history
from pagefleet_operator.metrics_text import parse_sample
from pagefleet_operator.model import ScalingPolicy, ScalingRules, Slo
from support.operator_objects import autoscaling, fleet, metrics_text, sample

FULL = sample(used=100, running=9, waiting=9, waiting_blocks=90, oldest=3.0)
IDLE = sample()
NO_WINDOW = ScalingRules(0, "Max", (ScalingPolicy("Percent", 100, 15),))
BOUNDS = (0.1, 1.0, math.inf)


def latencies(*counts: float) -> Latencies:
    return Latencies(time_to_first_token=Histogram(BOUNDS, counts))


def explained(decision: Decision) -> Decision:
    assert decision.reason
    assert decision.message
    return decision


def test_no_metrics_at_all_hold_the_fleet() -> None:
    decision = explained(decide(autoscaling(), fleet(3, None, None, None), History(), 0.0))
    assert (decision.replicas, decision.active, decision.reason) == (3, False, "FailedGetMetrics")


def test_half_a_fleet_silent_never_shrinks_it() -> None:
    spec = autoscaling(scale_down=NO_WINDOW)
    decision = explained(decide(spec, fleet(4, IDLE, IDLE, None, None), History(), 0.0))
    assert (decision.replicas, decision.reason) == (4, "MetricsMissing")


def test_half_a_fleet_silent_grows_only_for_what_is_seen() -> None:
    decision = decide(autoscaling(maximum=100), fleet(4, FULL, FULL, None, None), History(), 0.0)
    assert decision.replicas == 5, "380 blocks seen, 80 a replica"


@pytest.mark.parametrize(
    "text",
    [
        metrics_text(used=math.nan),
        metrics_text(running=-1),
        metrics_text(waiting_blocks=1e300),
        metrics_text(used=90, cached=90),
        metrics_text(total=0),
        "<html>",
        "",
    ],
    ids=["NaN", "negative", "huge", "contradiction", "no blocks", "not metrics", "empty"],
)
def test_nonsense_is_no_sample(text: str) -> None:
    with pytest.raises(ScrapeError):
        parse_sample(text, time=0.0)


def test_one_pod_that_exaggerates_is_bounded() -> None:
    liar = sample(used=100, waiting_blocks=2**40, running=2**40, waiting=2**40, oldest=2.0**40)
    decision = explained(decide(autoscaling(maximum=6), fleet(3, IDLE, IDLE, liar), History(), 0.0))
    assert (decision.replicas, decision.limited_by) == (6, "TooManyReplicas")


def test_one_pod_with_another_cache_size_does_not_shift_the_capacity() -> None:
    decision = decide(
        autoscaling(), fleet(3, sample(used=70), sample(used=70), sample(used=0, total=1)), History(), 0.0
    )
    assert decision.inputs.capacity_blocks == 80


def test_histograms_that_reset_count_what_came_after() -> None:
    window = LatencyWindow()
    window.observe({"a": (0.0, latencies(50, 90, 100))}, 0.0)
    seen = window.observe({"a": (10.0, latencies(1, 2, 3))}, 10.0)
    assert seen.time_to_first_token.total == 3
    later = window.observe({"a": (20.0, latencies(2, 3, 4))}, 20.0)
    assert 0 <= later.time_to_first_token.total <= 4


@pytest.mark.parametrize("jump", [-86400.0, -30.0, 30.0, 86400.0])
def test_a_clock_that_jumps_changes_nothing_for_long(jump: float) -> None:
    """A full fleet still grows, an idle one still shrinks, both within one window of the jump."""
    spec = autoscaling(slo=Slo(time_to_first_token_ms=500))
    window = LatencyWindow()

    def run(start: float, seconds: float, history: History, replicas: int, *, busy: bool) -> tuple[int, History]:
        now = start
        while now < start + seconds:
            one = sample(used=95, running=8) if busy else IDLE
            pods = tuple(FleetPod(f"p{i}", PodState.READY, replace(one, time=now)) for i in range(replicas))
            seen = window.observe({pod.name: (now, latencies(0, now % 1e6, now % 1e6)) for pod in pods}, now)
            decision = explained(decide(spec, Fleet(replicas, pods, seen), history, now))
            assert 1 <= decision.replicas <= 10
            history = decision.history
            if decision.replicas != replicas:
                history = history.changed(decision.replicas - replicas, now=now)
                replicas = decision.replicas
            now += 2.0
        return replicas, history

    start = 1_000_000.0
    replicas, history = run(start, 60, History(), 2, busy=False)
    grown, _ = run(start + 60 + jump, 30, history, replicas, busy=True)
    assert grown > replicas
    shrunk, _ = run(start + 60 + jump, 400, history.recommended(5, now=start + 60, window_seconds=300.0), 5, busy=False)
    assert shrunk == 1


def test_minimum_equal_to_maximum_is_that() -> None:
    spec = autoscaling(minimum=3, maximum=3, scale_down=NO_WINDOW)
    assert decide(spec, fleet(3, IDLE, IDLE, IDLE), History(), 0.0).limited_by == "TooFewReplicas"
    assert decide(spec, fleet(3, FULL, FULL, FULL), History(), 0.0).limited_by == "TooManyReplicas"
    for now in (fleet(3, IDLE, IDLE, IDLE), fleet(3, FULL, FULL, FULL)):
        assert decide(spec, now, History(), 0.0).replicas == 3


def test_a_maximum_below_what_runs_takes_effect_at_once() -> None:
    decision = explained(decide(autoscaling(maximum=3), fleet(8, *[FULL] * 8), History(), 0.0))
    assert (decision.replicas, decision.limited_by) == (3, "TooManyReplicas")
    silent = decide(autoscaling(maximum=3), fleet(8, *[None] * 8), History(), 0.0)
    assert (silent.replicas, silent.limited_by) == (3, "TooManyReplicas")


@pytest.mark.parametrize(("allowance", "want"), [(0, 1), (1, 1), (2, 2), (3, 3), (9, 5)])
def test_a_budget_bounds_everything_but_the_first_replica(allowance: int, want: int) -> None:
    spec = autoscaling(minimum=3)
    decision = explained(decide(spec, fleet(3, FULL, FULL, sample(used=20)), History(), 0.0, allowance=allowance))
    assert decision.replicas == want
    assert decision.unbudgeted == 5
    assert decision.limited_by == (None if allowance > 4 else "DeviceBudget")


def test_a_budget_holds_without_metrics_too() -> None:
    decision = decide(autoscaling(minimum=3), fleet(2, None, None), History(), 0.0, allowance=2)
    assert (decision.replicas, decision.unbudgeted, decision.limited_by) == (2, 3, "DeviceBudget")


def test_an_objective_that_cannot_be_met_is_bounded() -> None:
    spec = autoscaling(maximum=6, slo=Slo(time_to_first_token_ms=1))
    history, replicas = History(), 2
    for step in range(300):
        busy = replace(fleet(replicas, *[FULL] * replicas), latencies=latencies(0, 0, 500))
        decision = explained(decide(spec, busy, history, 2.0 * step))
        history, replicas = decision.history, decision.replicas
        assert replicas <= 6
    assert replicas == 6
    calm = replace(fleet(6, *[sample(used=30, running=1)] * 6), latencies=latencies(0, 0, 500))
    verdict = decide(spec, calm, replace(history, saturation_running=9.0), 1000.0).inputs.objective
    assert verdict is not None
    assert verdict.reason == "ObjectiveNotCapacityBound"


def test_a_pod_that_finds_no_node_blocks_no_shrinking() -> None:
    spec = autoscaling(scale_down=NO_WINDOW, slo=Slo(time_to_first_token_ms=500))
    pods = (*[FleetPod(f"p{i}", PodState.READY, IDLE) for i in range(3)], FleetPod("new", PodState.UNSCHEDULABLE))
    stuck = Fleet(4, pods, latencies(0, 100, 100))
    decision = decide(spec, stuck, History(), 0.0)
    assert decision.inputs.objective is not None
    assert decision.inputs.objective.reason != "Settling"


def test_crashing_pods_are_not_idle_capacity() -> None:
    pods = (FleetPod("a", PodState.READY, FULL), *[FleetPod(f"c{i}", PodState.CRASHED) for i in range(2)])
    decision = decide(autoscaling(), Fleet(3, pods), History(), 0.0)
    assert decision.replicas == 3, "190 blocks fit three replicas: crashing ones are repaired, not multiplied"


def test_damaged_history_is_left_out() -> None:
    status = {"autoscaling": {"history": {"buckets": [{"start": "soon", "maxWanted": 9}, {"start": None}]}}}
    history, decisions = restore_history(status, replicas=2, now=100.0)
    assert (history.buckets, decisions) == ((Bucket(100.0, 2),), [])


class TestDemand:
    """What of a queue counts."""

    def test_the_turnover_is_what_runs_over_what_begins(self) -> None:
        assert turnover_seconds(10, latencies(60, 60, 60)) == 10, "one first token a second"
        assert turnover_seconds(10, latencies(9, 9, 9)) is None
        assert turnover_seconds(0, latencies(60, 60, 60)) is None

    def test_it_is_learnt_while_nothing_waits(self) -> None:
        calm = replace(fleet(1, sample(used=10, running=10)), latencies=latencies(60, 60, 60))
        history = decide(autoscaling(), calm, History(), 0.0).history
        assert history.turnover_seconds == 10
        crowded = sample(used=100, running=90, waiting=3, waiting_blocks=30, oldest=1.0)
        surge = replace(fleet(1, crowded), latencies=latencies(60, 60, 60))
        assert decide(autoscaling(), surge, history, 2.0).history.turnover_seconds == 10

    def test_full_replicas_teach_it_once_they_were_full_all_through_the_window(self) -> None:
        """A full replica takes longer for each request than one with room, and so a short turnover hides demand."""
        history = History(turnover_seconds=10.0)
        for oldest, want in ((30.0, 10.0), (90.0, 10.5)):
            full = sample(used=100, running=20, waiting=50, waiting_blocks=500, oldest=oldest)
            surge = replace(fleet(1, full), latencies=latencies(60, 60, 60))
            assert decide(autoscaling(), surge, history, 0.0).history.turnover_seconds == want
        mixed = replace(fleet(2, full, sample(running=1)), latencies=latencies(60, 60, 60))
        assert decide(autoscaling(), mixed, history, 0.0).history.turnover_seconds == 10.0

    def test_without_a_queue_it_is_what_runs(self) -> None:
        assert demand_of([sample(used=70, running=7)], 10.0, 0.0).demand == 70

    def test_without_a_turnover_all_that_waits_counts(self) -> None:
        old = sample(used=100, running=10, waiting=50, waiting_blocks=500, oldest=100.0)
        assert demand_of([old], None, 0.0).demand == 600

    def test_a_young_queue_counts_beside_what_came_within_the_same_turnover(self) -> None:
        young = sample(used=100, running=10, waiting=5, waiting_blocks=50, oldest=5.0)
        assert demand_of([young], 10.0, 0.0).demand == pytest.approx(100 * 0.5 + 50, abs=51)

    def test_an_old_queue_counts_at_the_rate_at_which_it_came(self) -> None:
        """10 requests run 10 s each; 400 came within 100 s: 4 a second need 40 at once."""
        old = sample(used=100, running=10, waiting=400, waiting_blocks=4000, oldest=100.0)
        found = demand_of([old], 10.0, 0.0)
        assert found.requests == pytest.approx(40)
        assert found.demand == pytest.approx(400)

    def test_it_is_never_less_than_what_runs(self) -> None:
        stuck = sample(used=100, running=10, waiting=1, waiting_blocks=10, oldest=500.0)
        assert demand_of([stuck], 10.0, 0.0).demand == 100


def test_changes_after_now_do_not_count_against_the_policies() -> None:
    spec = autoscaling(maximum=100, scale_up=ScalingRules(0, "Max", (ScalingPolicy("Pods", 4, 60),)))
    crowd = fleet(4, *[FULL] * 4)
    assert decide(spec, crowd, History(changes=(Change(5000.0, 4),)), 1000.0).replicas == 8
