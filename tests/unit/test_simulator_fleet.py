"""The simulated fleet: nothing is lost, everything is counted, and what goes wrong goes wrong as in a cluster."""

from dataclasses import replace

import pytest

from pagefleet_operator.fleet import Fleet
from pagefleet_simulator.policies.simple import Static
from pagefleet_simulator.results import count_reversals, percentile, summarise
from pagefleet_simulator.routing import ROUTINGS
from pagefleet_simulator.scenario import Faults
from pagefleet_simulator.simulation import Outcome, simulate
from support.simulation import evenly, small_profile, small_scenario


class Plan:
    """Replicas by time."""

    name = "plan"
    period_seconds = 1.0

    def __init__(self, *steps: tuple[float, int]) -> None:
        self.steps = steps
        self.seen: list[Fleet] = []

    def decide(self, fleet: Fleet, now: float) -> int:
        self.seen.append(fleet)
        return [count for time, count in self.steps if time <= now][-1]


def facts(outcome: Outcome) -> list[tuple[float | None, float | None, bool]]:
    return [(item.first_token, item.ended, item.failed) for item in outcome.served]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_request_is_served_through_growing_and_shrinking(routing: str) -> None:
    load = evenly(300, 0.4)
    scenario = small_scenario(initial_replicas=2, routing=routing)
    outcome = simulate(load, scenario, Plan((0, 2), (10, 5), (60, 1), (90, 4)))
    assert len(outcome.served) == 300
    assert not any(item.failed or item.ended is None for item in outcome.served)
    assert [change[1:] for change in outcome.changes] == [(2, 5), (5, 1), (1, 4)]


def test_a_run_is_a_function_of_its_seed() -> None:
    load, scenario = evenly(200, 0.1), small_scenario(initial_replicas=3, faults=Faults(30.0, 0.3))
    first, second = (simulate(load, scenario, Plan((0, 3), (5, 4))) for _ in range(2))
    other = simulate(load, replace(scenario, seed=1), Plan((0, 3), (5, 4)))
    assert facts(first) == facts(second)
    assert facts(first) != facts(other)


def test_skipping_steps_changes_nothing_in_a_fleet() -> None:
    load, scenario = evenly(250, 0.07), small_scenario(initial_replicas=2)
    runs = [simulate(load, scenario, Plan((0, 2), (6, 3)), skips=skips) for skips in (True, False)]
    assert facts(runs[0]) == facts(runs[1])
    assert runs[0].timeline == runs[1].timeline


def test_device_hours_are_those_that_pods_held() -> None:
    load = evenly(100, 1.0, prompt=10, output=2)
    outcome = simulate(load, small_scenario(profile=small_profile(devices=2)), Plan((0, 1), (40, 2)))
    assert outcome.device_seconds == pytest.approx(2 * (100 + 60))


def test_a_leaving_pod_holds_its_device_until_it_has_drained() -> None:
    load = evenly(100, 1.0, prompt=10, output=2)
    outcome = simulate(load, small_scenario(initial_replicas=2), Plan((0, 2), (40, 1)))
    assert outcome.device_seconds == pytest.approx(100 + 40 + 10)


def test_pods_beyond_the_devices_wait_and_hold_none() -> None:
    plan = Plan((0, 3), (60, 2))
    outcome = simulate(evenly(100, 1.0, prompt=10, output=2), small_scenario(devices=2, initial_replicas=2), plan)
    states = [sorted(pod.state for pod in fleet.pods) for fleet in plan.seen]
    assert states[30] == ["Ready", "Ready", "Unschedulable"]
    assert states[80] == ["Ready", "Ready"], "the pod that waits goes first"
    assert outcome.device_seconds == pytest.approx(200)


def test_a_crash_fails_its_requests_and_the_pod_starts_again() -> None:
    load = evenly(400, 0.5, output=80)
    plan = Plan((0, 2))
    outcome = simulate(load, small_scenario(initial_replicas=2, faults=Faults(crash_every_seconds=60.0)), plan)
    failed = sum(item.failed for item in outcome.served)
    assert 0 < failed < 200
    assert failed == sum(item.failed or item.ended is None for item in outcome.served)
    assert {pod.state.value for fleet in plan.seen for pod in fleet.pods} >= {"Ready", "Crashed", "Starting"}


def test_silent_pods_are_unreachable_once_their_sample_is_old() -> None:
    plan = Plan((0, 2))
    simulate(evenly(60, 1.0), small_scenario(initial_replicas=2, faults=Faults(silence=((20.0, 40.0),))), plan)
    states = [{pod.state.value for pod in fleet.pods} for fleet in plan.seen]
    assert states[15] == states[25] == {"Ready"}, "a sample is believed for ten seconds"
    assert states[35] == {"Unreachable"}
    assert states[45] == {"Ready"}


def test_keep_alive_pins_clients_until_a_queue_sends_them_on() -> None:
    load = evenly(120, 0.5, prompt=10, output=2)
    scenario = small_scenario(clients=1)
    outcome = simulate(load, scenario, Plan((0, 1), (2, 2)))
    assert {item.connection for item in outcome.served} == {1}
    crowded = simulate(evenly(600, 0.05), scenario, Plan((0, 1), (2, 3)))
    assert len({item.connection for item in crowded.served}) > 3


def test_summaries_count_failures_as_missed() -> None:
    load = evenly(400, 0.02, output=80)
    scenario = small_scenario(profile=small_profile(max_queue=4))
    result = summarise(scenario, simulate(load, scenario, Static(1)))
    assert result.failed > 100
    assert result.attainment_percent < 100 * (400 - result.failed) / 400 + 1e-9
    assert result.p95_first_token_seconds == float("inf")


def test_a_warm_up_is_lived_through_and_not_counted() -> None:
    load = evenly(100, 1.0, prompt=10, output=2)
    scenario = small_scenario(initial_replicas=2, warmup_seconds=50.0)
    outcome = simulate(load, scenario, Plan((0, 2), (20, 5), (30, 2), (70, 3)))
    result = summarise(scenario, outcome)
    assert len(outcome.served) == 100
    assert result.requests == 50
    assert result.device_hours == pytest.approx((100 + 30) / 3600)
    assert (result.changes, result.reversals, result.most_replicas) == (1, 0, 3)


def test_the_start_up_time_of_the_first_replicas_is_known() -> None:
    plan = Plan((0, 2))
    simulate(evenly(3, 1.0), small_scenario(initial_replicas=2, start_seconds=33.0), plan)
    assert [pod.start_seconds for pod in plan.seen[0].pods] == [33.0, 33.0]


def test_reversals_are_changes_of_direction_within_ten_minutes() -> None:
    assert count_reversals([(0, 1, 2), (10, 2, 4), (300, 4, 3), (1000, 3, 5)]) == 1
    assert count_reversals([(0, 1, 2), (601, 2, 1)]) == 0


def test_percentiles() -> None:
    assert percentile([], 95) == 0
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 99) == 4.0


@pytest.mark.parametrize(
    "fields",
    [
        {"min_replicas": 3},
        {"initial_replicas": 9},
        {"start_seconds": 0.0},
        {"clients": 0},
        {"warmup_seconds": -1.0},
        {"faults": Faults(silent_part=2)},
    ],
)
def test_scenarios_that_cannot_be(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"is|hold"):
        small_scenario(**fields)
