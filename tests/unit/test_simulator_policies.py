"""Known decisions of the known policies, after their published formulas."""

import pytest

from pagefleet_operator.fleet import Fleet
from pagefleet_simulator.policies import hpa
from pagefleet_simulator.policies.apa import Apa, ApaSettings, scaled
from pagefleet_simulator.policies.hpa import Hpa, HpaSettings
from pagefleet_simulator.policies.kpa import Kpa, KpaSettings
from pagefleet_simulator.policies.simple import KubeAi, KubeAiSettings, Static
from pagefleet_simulator.policies.wva import WvaPercent, WvaSettings, WvaTokens
from support.operator_objects import sample
from support.simulation import ready_fleet


class TestHpa:
    @pytest.mark.parametrize(
        ("values", "current", "missing", "unstarted", "want"),
        [
            ([80.0, 80.0], 2, 0, 0, 2),
            ([87.0, 87.0], 2, 0, 0, 2),
            ([100.0, 100.0], 2, 0, 0, 3),
            ([20.0, 20.0, 20.0, 20.0], 4, 0, 0, 1),
            ([100.0], 2, 0, 1, 2),  # the starting one counts at 0: the direction would turn
            ([160.0], 2, 0, 1, 2),
            ([300.0], 2, 0, 1, 4),
            ([20.0, 20.0], 3, 1, 0, 2),  # the silent one counts at target
            ([76.0, 76.0], 3, 1, 0, 3),
        ],
    )
    def test_one_metric(self, values: list[float], current: int, missing: int, unstarted: int, want: int) -> None:
        assert hpa.replicas(values, 80.0, current, missing, unstarted) == want

    def test_the_larger_metric_wins_and_the_step_is_bounded(self) -> None:
        policy = Hpa(HpaSettings())
        assert policy.decide(ready_fleet(1, sample(used=50, waiting=12)), 0.0) == 3
        assert Hpa(HpaSettings()).decide(ready_fleet(1, sample(used=50, waiting=100)), 0.0) == 5

    def test_shrinking_waits_for_its_window(self) -> None:
        policy = Hpa(HpaSettings())
        idle = ready_fleet(4, *[sample()] * 4)
        counts = [policy.decide(idle, 15.0 * tick) for tick in range(25)]
        assert counts[:20] == [4] * 20
        assert counts[-1] == 0, "the simulation bounds it by the minimum"

    def test_without_metrics_nothing_changes(self) -> None:
        assert Hpa(HpaSettings()).decide(ready_fleet(3, None, None, None), 0.0) == 3


class TestKpa:
    def run(self, policy: Kpa, fleet: Fleet, start: float, seconds: float) -> int:
        wanted = 0
        now = start
        while now < start + seconds:
            wanted = policy.decide(fleet, now)
            now += 2
        return wanted

    def test_the_stable_window_divides_by_the_target(self) -> None:
        assert self.run(Kpa(KpaSettings(10.0)), ready_fleet(1, sample(running=12)), 0, 70) == 2

    def test_panic_follows_the_short_window_and_never_shrinks(self) -> None:
        policy = Kpa(KpaSettings(10.0))
        self.run(policy, ready_fleet(1, sample(running=2)), 0, 60)
        assert self.run(policy, ready_fleet(1, sample(running=20, waiting=40)), 60, 8) == 6
        assert self.run(policy, ready_fleet(1, sample()), 68, 50) == 6

    def test_it_begins_in_panic(self) -> None:
        policy = Kpa(KpaSettings(10.0))
        assert self.run(policy, ready_fleet(3, *[sample()] * 3), 0, 50) == 3
        assert self.run(policy, ready_fleet(3, *[sample()] * 3), 50, 70) == 1


class TestApa:
    @pytest.mark.parametrize(("ratio", "want"), [(1.05, 4), (1.5, 6), (3.0, 8), (0.95, 4), (0.7, 3), (0.1, 2)])
    def test_one_step(self, ratio: float, want: int) -> None:
        assert scaled(4, ratio) == want

    def test_shrinking_waits_for_the_cooldown(self) -> None:
        policy = Apa(ApaSettings())
        counts = [policy.decide(ready_fleet(2, sample(), sample()), 10.0 * tick) for tick in range(40)]
        assert counts[:29] == [2] * 29
        assert counts[-1] == 1


def wva1(fleet: Fleet) -> int:
    return WvaPercent(WvaSettings()).decide(fleet, 0.0)


class TestWva:
    def test_v1_adds_one_when_little_is_spare(self) -> None:
        assert wva1(ready_fleet(2, sample(used=75), sample(used=75))) == 3
        assert wva1(ready_fleet(2, sample(used=90), sample(used=90))) == 3
        assert wva1(ready_fleet(2, sample(used=50, waiting=4), sample(used=50, waiting=4))) == 3

    def test_v1_removes_one_when_the_rest_can_take_it(self) -> None:
        assert wva1(ready_fleet(2, sample(used=30), sample(used=30))) == 1
        assert wva1(ready_fleet(2, sample(used=50), sample(used=50))) == 2

    def test_v1_waits_while_replicas_are_pending(self) -> None:
        assert wva1(ready_fleet(2, sample(used=95), starting=1)) == 2

    def test_v2_jumps_and_counts_what_is_pending(self) -> None:
        policy = WvaTokens(WvaSettings(), mean_prompt_blocks=10.0)
        assert policy.decide(ready_fleet(1, sample(used=80, waiting=4)), 0.0) == 2
        assert policy.decide(ready_fleet(2, sample(used=80, waiting=4), starting=1), 15.0) == 2

    def test_v2_learns_the_knee(self) -> None:
        policy = WvaTokens(WvaSettings(), mean_prompt_blocks=1.0)
        assert policy.decide(ready_fleet(1, sample(used=20, waiting=6)), 0.0) == 2


class TestKubeAi:
    def test_the_mean_over_its_window(self) -> None:
        policy = KubeAi(KubeAiSettings(10.0, 60.0, 30.0))
        assert policy.decide(ready_fleet(1, sample(running=25)), 0.0) == 3

    def test_it_shrinks_after_several_decisions(self) -> None:
        policy = KubeAi(KubeAiSettings(10.0, 10.0, 30.0))
        counts = [policy.decide(ready_fleet(3, *[sample()] * 3), 10.0 * tick) for tick in range(5)]
        assert counts == [3, 3, 3, 1, 1]

    def test_a_silent_replica_skips_the_interval(self) -> None:
        policy = KubeAi(KubeAiSettings())
        assert policy.decide(ready_fleet(2, sample(running=90), None), 0.0) == 2


def test_static() -> None:
    assert Static(3).decide(ready_fleet(1, sample()), 0.0) == 3
