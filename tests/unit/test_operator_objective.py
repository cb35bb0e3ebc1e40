"""Latencies from histograms, forecasts, and what the objective does to the decision."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefleet_operator.autoscale import decide
from pagefleet_operator.errors import ScrapeError
from pagefleet_operator.fleet import Fleet
from pagefleet_operator.forecast import PRIOR_START_SECONDS, Point, project, smooth, start_seconds
from pagefleet_operator.history import History
from pagefleet_operator.latency import Histogram, Latencies, LatencyWindow
from pagefleet_operator.metrics_text import parse_sample
from pagefleet_operator.model import Slo
from support.operator_objects import autoscaling, fleet, metrics_text, sample

BOUNDS = (0.1, 0.5, 1.0, math.inf)
OBJECTIVE = Slo(time_to_first_token_ms=500)


def histogram(*counts: float) -> Histogram:
    return Histogram(BOUNDS, counts)


def seen(*counts: float) -> Latencies:
    return Latencies(time_to_first_token=histogram(*counts))


class TestHistogram:
    def test_quantiles_are_interpolated_within_a_bucket(self) -> None:
        assert histogram(0, 10, 20, 20).quantile(0.5) == 0.5
        assert histogram(0, 10, 20, 20).quantile(0.75) == 0.75
        assert histogram(10, 10, 10, 10).quantile(0.5) == pytest.approx(0.05)

    def test_beyond_the_last_bound_nothing_is_known_but_the_bound(self) -> None:
        assert histogram(0, 0, 0, 5).quantile(0.95) == 1.0

    def test_without_observations_there_is_no_quantile(self) -> None:
        assert histogram(0, 0, 0, 0).quantile(0.95) is None
        assert Histogram().quantile(0.5) is None
        assert Histogram().share_within(1.0) is None

    def test_shares_are_interpolated_too(self) -> None:
        assert histogram(10, 20, 20, 20).share_within(0.3) == pytest.approx(0.75)
        assert histogram(10, 20, 20, 40).share_within(5.0) == 0.5

    def test_a_reset_counts_what_came_after_it(self) -> None:
        assert histogram(1, 2, 3, 4).since(histogram(5, 6, 7, 8)) == histogram(1, 2, 3, 4)
        assert histogram(5, 6, 7, 8).since(histogram(1, 2, 3, 4)) == histogram(4, 4, 4, 4)

    def test_other_bounds_are_never_mixed(self) -> None:
        other = Histogram((1.0, math.inf), (3, 3))
        assert histogram(1, 1, 1, 1).plus(other) == histogram(1, 1, 1, 1)
        assert histogram(1, 1, 1, 1).since(other) == histogram(1, 1, 1, 1)

    @settings(deadline=None)
    @given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.floats(0.01, 0.99))
    def test_a_quantile_is_within_its_share(self, counts: list[int], part: float) -> None:
        rising = [float(sum(counts[: index + 1])) for index in range(4)]
        made = histogram(*rising)
        bound = made.quantile(part)
        if bound is not None and bound < 1.0:
            share = made.share_within(bound)
            assert share is not None
            assert share >= part - 1e-9


class TestWindow:
    def test_only_the_last_window_counts(self) -> None:
        window = LatencyWindow()
        window.observe({"a": (0.0, seen(100, 100, 100, 100))}, 0.0)
        recent = window.observe({"a": (30.0, seen(100, 110, 110, 110))}, 30.0)
        assert recent.time_to_first_token == histogram(0, 10, 10, 10)
        later = window.observe({"a": (100.0, seen(100, 110, 115, 115))}, 100.0)
        assert later.time_to_first_token.total == 5

    def test_pods_add_up_and_gone_ones_are_forgotten(self) -> None:
        window = LatencyWindow()
        window.observe({"a": (0.0, seen(0, 0, 0, 0)), "b": (0.0, seen(0, 0, 0, 0))}, 0.0)
        both = {"a": (2.0, seen(1, 1, 1, 1)), "b": (2.0, seen(2, 2, 2, 2))}
        assert window.observe(both, 2.0).time_to_first_token.total == 3
        assert window.observe({"a": (4.0, seen(1, 1, 1, 1))}, 4.0).time_to_first_token.total == 1


class TestForecast:
    def points(self, *demands: float, gap: float = 30.0) -> list[Point]:
        return [Point(gap * index, demand) for index, demand in enumerate(demands, start=1)]

    def test_a_steady_rise_goes_on(self) -> None:
        points = self.points(100, 110, 120, 130, 140, 150, 160, 170)
        assert project(points, 170, 240.0, 120.0) == pytest.approx(210)

    def test_it_at_most_doubles(self) -> None:
        points = self.points(10, 50, 90, 130, 170, 210, 250, 290)
        assert project(points, 290, 240.0, 1000.0) == 580

    def test_falling_and_flat_demand_stays_what_it_is(self) -> None:
        assert project(self.points(9, 8, 7, 6, 5, 4, 3, 2), 2, 240.0, 60.0) == 2
        assert project(self.points(*[5] * 8), 5, 240.0, 60.0) == 5

    @pytest.mark.parametrize("before", range(9))
    def test_a_step_is_no_trend_wherever_it_stands(self, before: int) -> None:
        points = self.points(*[10.0] * before, *[100.0] * (8 - before))
        assert project(points, 100, 240.0, 60.0) == 100

    def test_few_points_make_no_trend(self) -> None:
        assert project(self.points(0, 50, 100), 100, 90.0, 60.0) == 100

    def test_demand_is_the_mean_of_some_seconds(self) -> None:
        points = self.points(10, 20, 30, 40, gap=4.0)
        assert smooth(points, 16.0).demand == 25
        assert smooth(points, 200.0).demand == 40, "the last one always counts"

    @settings(deadline=None)
    @given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 3600))
    def test_it_is_bounded(self, demands: list[float], horizon: float) -> None:
        points = self.points(*demands)
        found = project(points, demands[-1], points[-1].time, horizon)
        assert demands[-1] <= found <= 2 * demands[-1] + 1e-9

    def test_start_up_time_is_measured_or_assumed(self) -> None:
        assert start_seconds([]) == PRIOR_START_SECONDS
        assert start_seconds([(str(index), float(index)) for index in range(1, 11)]) == 10.0


def test_a_ramp_orders_replicas_before_it_needs_them() -> None:
    spec = autoscaling()
    history = History(starts=(("p", 60.0),))
    decision = decide(spec, fleet(1, sample(used=20)), history, 0.0)
    for step in range(1, 175):
        decision = decide(spec, fleet(1, sample(used=10 + int(0.4 * step))), decision.history, 2.0 * step)
        if decision.replicas > 1:
            break
    assert decision.replicas == 2
    assert decision.inputs.load.demand_blocks < 80, "before the target is reached"
    assert "rising to" in decision.message


def slow(latencies: Latencies, *samples: Any, replicas: int) -> Fleet:
    return replace(fleet(replicas, *samples), latencies=latencies)


MISSED = seen(0, 0, 100, 100)
FAST = seen(100, 100, 100, 100)
QUEUEING = sample(used=40, running=4, waiting=2, oldest=2.0)


class TestObjective:
    spec = autoscaling(slo=OBJECTIVE)

    def test_missed_and_full_asks_for_more(self) -> None:
        decision = decide(self.spec, slow(MISSED, QUEUEING, QUEUEING, replicas=2), History(), 0.0)
        assert (decision.replicas, decision.reason) == (3, "Objective")
        assert decision.inputs.objective is not None
        assert decision.inputs.objective.met is False

    def test_missed_with_room_scales_nothing_and_blocks_no_shrinking(self) -> None:
        history = History(saturation_running=10.0)
        calm = sample(used=1, running=1)
        decision = decide(self.spec, slow(MISSED, calm, calm, calm, replicas=3), history, 0.0)
        assert decision.recommended == 1
        assert decision.inputs.objective is not None
        assert decision.inputs.objective.reason == "ObjectiveNotCapacityBound"

    def test_just_met_keeps_what_is_there(self) -> None:
        just = seen(0, 95, 100, 100)
        decision = decide(self.spec, slow(just, sample(), sample(), sample(), replicas=3), History(), 0.0)
        assert decision.recommended == 3

    def test_met_with_room_lets_it_shrink(self) -> None:
        decision = decide(self.spec, slow(FAST, sample(), sample(), sample(), replicas=3), History(), 0.0)
        assert decision.recommended == 1

    def test_few_requests_say_nothing(self) -> None:
        few = seen(0, 0, 5, 5)
        decision = decide(self.spec, slow(few, QUEUEING, replicas=1), History(), 0.0)
        assert decision.replicas == 1

    def test_after_growing_the_past_is_not_held_against_the_new_fleet(self) -> None:
        growing = decide(self.spec, slow(MISSED, QUEUEING, replicas=2), History(), 0.0)
        assert growing.replicas == 2
        settled = slow(MISSED, QUEUEING, QUEUEING, replicas=2)
        frozen = decide(self.spec, settled, growing.history, 59.0)
        assert frozen.replicas == 2
        assert frozen.inputs.objective is not None
        assert frozen.inputs.objective.reason == "Settling"
        assert decide(self.spec, settled, frozen.history, 61.0).replicas == 3

    @pytest.mark.parametrize(("target_ms", "wanted"), [(900, 10), (850, 11), (610, 13), (400, 16), (100, 20)])
    def test_it_grows_by_the_root_of_what_is_missed(self, target_ms: int, wanted: int) -> None:
        """0.975 s were seen; ten full replicas."""
        spec = autoscaling(maximum=100, slo=Slo(time_to_first_token_ms=target_ms))
        full = sample(used=0, running=4, waiting=2, oldest=2.0)
        decision = decide(spec, slow(MISSED, *[full] * 10, replicas=10), History(), 0.0)
        assert decision.recommended == wanted

    @settings(deadline=None)
    @given(st.lists(st.integers(0, 200), min_size=4, max_size=4), st.integers(1, 8))
    def test_it_never_more_than_doubles(self, counts: list[int], replicas: int) -> None:
        rising = [float(sum(counts[: index + 1])) for index in range(4)]
        decision = decide(
            autoscaling(maximum=1000, slo=Slo(time_to_first_token_ms=1)),
            slow(seen(*rising), *[QUEUEING] * replicas, replicas=replicas),
            History(),
            0.0,
        )
        assert decision.recommended <= 2 * replicas


def histogram_text(name: str, counts: list[str]) -> str:
    rows = [
        f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in zip(["0.1", "1.0", "+Inf"], counts, strict=True)
    ]
    return "\n".join([f"# TYPE {name} histogram", *rows, f"{name}_count {counts[-1]}", f"{name}_sum 1", ""])


def test_histograms_are_read_from_the_metrics() -> None:
    text = metrics_text() + histogram_text("vllm:time_to_first_token_seconds", ["1", "3", "4"])
    latencies = parse_sample(text, time=0.0).latencies
    assert latencies.time_to_first_token == Histogram((0.1, 1.0, math.inf), (1.0, 3.0, 4.0))
    assert latencies.inter_token == Histogram()


def test_a_bound_that_is_no_number_is_no_sample() -> None:
    text = histogram_text("vllm:time_to_first_token_seconds", ["1", "2", "4"]).replace('"0.1"', '"NaN"')
    with pytest.raises(ScrapeError, match="no histogram"):
        parse_sample(metrics_text() + text, time=0.0)


@pytest.mark.parametrize("counts", [["3", "1", "4"], ["1", "NaN", "4"], ["-1", "1", "2"], ["1", "2", "1e300"]])
def test_nonsense_histograms_are_no_sample(counts: list[str]) -> None:
    with pytest.raises(ScrapeError, match="no histogram"):
        parse_sample(metrics_text() + histogram_text("vllm:time_to_first_token_seconds", counts), time=0.0)
