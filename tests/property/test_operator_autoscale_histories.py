"""Long histories of decisions in virtual time: silence, clocks that step, restarts from a damaged status."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefleet_operator.autoscale import Decision, decide
from pagefleet_operator.fleet import Fleet, FleetPod, PodState, Sample
from pagefleet_operator.history import UNWATCHED_SECONDS, History
from pagefleet_operator.latency import Histogram, Latencies, LatencyWindow
from pagefleet_operator.memory import remember, restore_history
from pagefleet_operator.model import AutoscalingSpec, ScalingPolicy, ScalingRules, Slo
from support.operator_objects import autoscaling, fleet, sample

BOUNDS = (0.1, 1.0, math.inf)
AT_ONCE = (ScalingPolicy("Percent", 100, 15),)


@dataclass
class World:
    """Pods under a wandering load, and one operator after the other."""

    chance: random.Random
    spec: AutoscalingSpec
    now: float = 1_700_000_000.0
    replicas: int = 1
    load: float = 0.0
    silent_until: float = 0.0
    allowance: int | None = None
    watched_at: float = 1_700_000_000.0
    history: History = field(default_factory=History)
    needs: list[tuple[float, int]] = field(default_factory=list)
    """(time, replicas) that could not be given back then."""

    def __post_init__(self) -> None:
        self.begin_anew({})

    def begin_anew(self, status: Any) -> None:
        """An operator that starts."""
        self.history, _ = restore_history(status, replicas=self.replicas, now=self.now)
        self.latencies, self.watched_at = LatencyWindow(), self.now
        self.needs = [(self.now, self.replicas)]

    def pods(self) -> Iterator[FleetPod]:
        for index in range(self.replicas):
            share = 2 * self.chance.random() * self.load / self.replicas
            state = self.chance.choices([PodState.READY, *PodState], [60, 1, 1, 1, 1, 1, 1])[0]
            if state is not PodState.READY or self.now < self.silent_until:
                yield FleetPod(f"p{index}", PodState.UNREACHABLE if state is PodState.READY else state)
                continue
            waiting = 2**40 if self.chance.random() < 0.001 else int(20 * max(0.0, share - 1))
            count = float(int(self.now) % 5000)  # falls to zero now and then, as after a reset
            yield FleetPod(
                f"p{index}",
                PodState.READY,
                Sample(
                    time=self.now,
                    blocks_used=int(100 * min(1.0, share)),
                    blocks_cached=0,
                    blocks_total=100,
                    blocks_waiting=5 * waiting,
                    running=int(20 * min(1.0, share)),
                    waiting=waiting,
                    oldest_waiting_seconds=200 * self.chance.random() if waiting else 0.0,
                    latencies=Latencies(time_to_first_token=Histogram(BOUNDS, (count / 2, count, count))),
                ),
                start_seconds=self.chance.choice([None, 30.0]),
            )

    def pass_time(self) -> None:
        chance = self.chance
        self.now += 2.0
        if chance.random() < 0.004:
            self.now += chance.choice([-86400, -20, -1, 20, 600, 86400])
        if chance.random() < 0.02:
            self.load = chance.choice([0, 1, 5, 30]) * chance.random()
        if chance.random() < 0.004:
            self.silent_until = self.now + chance.choice([4, 100, 700])
        if chance.random() < 0.01:
            self.allowance = chance.choice([None, 0, 1, 5])
        if chance.random() < 0.004:
            self.replicas = chance.randint(1, self.spec.max_replicas)  # by hand
        if chance.random() < 0.004:
            decision = self.decide()
            status = {"autoscaling": {"history": remember(decision.history, recommended=decision.recommended)}}
            self.now += chance.choice([-600, 0, 20, 86400])
            self.begin_anew(json.loads(json.dumps(status)) if chance.random() < 0.7 else {})

    def decide(self) -> Decision:
        pods = tuple(self.pods())
        seen = {pod.name: (pod.sample.time, pod.sample.latencies) for pod in pods if pod.sample is not None}
        observed = Fleet(self.replicas, pods, self.latencies.observe(seen, self.now))
        return decide(self.spec, observed, self.history, self.now, allowance=self.allowance)

    def step(self) -> Decision:
        self.pass_time()
        decision = self.decide()
        if decision.active:
            unknown = abs(self.now - self.watched_at) >= UNWATCHED_SECONDS
            self.needs.append((self.now, max(decision.recommended, self.replicas if unknown else 0)))
            self.watched_at = self.now
        return decision

    def apply(self, decision: Decision) -> None:
        self.history = decision.history.changed(decision.replicas - self.replicas, now=self.now)
        self.replicas = decision.replicas


@pytest.mark.parametrize("seed", range(8))
def test_every_decision_is_bounded_explained_and_never_early(seed: int) -> None:
    chance = random.Random(seed)
    spec = AutoscalingSpec(
        max_replicas=chance.choice([4, 12]),
        min_replicas=chance.choice([1, 3]),
        kv_block_occupancy_percent=chance.choice([40, 80]),
        scale_down=ScalingRules(chance.choice([60, 300]), "Max", AT_ONCE),
        slo=chance.choice([None, Slo(time_to_first_token_ms=500)]),
    )
    world = World(chance, spec)
    for _ in range(400):
        decision = world.step()
        check_bounds(world, decision)
        check_explanation(world, decision)
        check_patience(world, decision)
        world.apply(decision)


def check_bounds(world: World, decision: Decision) -> None:
    cap = world.spec.max_replicas if world.allowance is None else max(1, world.allowance)
    assert min(world.spec.min_replicas, cap) <= decision.replicas <= min(world.spec.max_replicas, cap)
    assert len(decision.message) <= 512, "the CRD takes no more"


def check_explanation(world: World, decision: Decision) -> None:
    """The rule named is the one that won, and without a limit the rule's count is what is wanted."""
    if not decision.active:
        assert decision.reason in ("FailedGetMetrics", "NoReadyPods")
        return
    wants = decision.inputs.wants
    highest = max(wants.values())
    if decision.reason == "WithinTolerance":
        assert decision.recommended == world.replicas == highest
        assert all(wants.get(rule, 0) < highest or wants["KVBlocks"] == highest for rule in ("Objective", "Standing"))
    elif decision.reason == "MetricsMissing":
        assert decision.recommended == world.replicas > highest
        assert 2 * decision.inputs.missing_pods >= decision.inputs.load.pods
    else:
        assert wants[decision.reason] == decision.recommended == highest
    if decision.limited_by is None:
        assert decision.replicas == decision.recommended
    if decision.limited_by == "TooManyReplicas":
        assert decision.replicas == world.spec.max_replicas
    if decision.limited_by == "TooFewReplicas":
        assert decision.replicas == world.spec.min_replicas
    if decision.limited_by == "DeviceBudget":
        assert world.allowance is not None
        assert decision.replicas == max(1, world.allowance) < decision.unbudgeted


def check_patience(world: World, decision: Decision) -> None:
    """Nothing within the scale-down window needed more, as far as anybody was watching."""
    if decision.replicas < world.replicas and decision.limited_by not in ("TooManyReplicas", "DeviceBudget"):
        since = world.now - world.spec.scale_down.stabilization_window_seconds
        needed = [replicas for time, replicas in world.needs if since < time <= world.now]
        assert max(needed) <= decision.replicas


IDLE = fleet(4, *[sample()] * 4)
DOWN = autoscaling(scale_down=ScalingRules(300, "Max", AT_ONCE))


@pytest.mark.parametrize("away", [700.0, -700.0, 86400.0])
def test_a_time_that_nobody_watched_counts_as_needed(away: float) -> None:
    """After an outage of all metrics that outlasted the window, or a step of the clock, a fleet shrank at once."""
    now = 1_000_000.0
    busy = fleet(4, *[sample(used=80)] * 4)
    history = decide(DOWN, busy, History(), now).history
    silent = decide(DOWN, fleet(4, None, None, None, None), history, now + away / 2)
    back = now + away
    decision = decide(DOWN, IDLE, silent.history, back)
    assert (decision.replicas, decision.limited_by) == (4, "ScaleDownStabilized")
    for later in range(2, 290, 2):
        decision = decide(DOWN, IDLE, decision.history, back + later)
        assert decision.replicas == 4
    for later in range(290, 400, 2):
        decision = decide(DOWN, IDLE, decision.history, back + later)
    assert decision.replicas == 1


def test_a_short_silence_delays_nothing() -> None:
    history = decide(DOWN, fleet(4, *[sample(used=80)] * 4), History(), 0.0).history
    now = 0.0
    while now < 350:
        now += 2.0
        silent = now % 20 < 6
        decision = decide(DOWN, fleet(4, None, None, None, None) if silent else IDLE, history, now)
        history = decision.history
    assert decision.replicas == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NUMBER = st.sampled_from([-(2**31), -100, -1, 0, 1, 7, 2**31 - 1, 2**62]) | JSON
TIME = st.sampled_from(["2001-09-09T01:46:40Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "soon"]) | JSON


def records(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An object of which anything may be missing, or something else in its place."""
    return st.fixed_dictionaries({}, optional=fields) | JSON


STANDING = records(
    replicas=NUMBER,
    seenReplicaMinutes=NUMBER,
    longestQuietMinutes=NUMBER,
    late=st.lists(records(replicas=NUMBER, permille=NUMBER), max_size=4) | JSON,
)
MEMORY = records(
    buckets=st.lists(records(start=TIME, maxWanted=NUMBER), max_size=3) | JSON,
    startupSecondsP90=NUMBER,
    saturationRunning=NUMBER,
    turnoverMilliseconds=NUMBER,
    standing=STANDING,
)
DECISIONS = st.lists(records(time=TIME, **{"from": NUMBER, "to": NUMBER}), max_size=3) | JSON
STATUS = st.fixed_dictionaries({"autoscaling": records(history=MEMORY, decisions=DECISIONS)})


@settings(deadline=None, max_examples=50)
@given(STATUS, st.sampled_from([0.0, 1_000_000_000.0, 4e9]))
def test_any_status_is_a_beginning_and_nothing_shrinks_early(status: dict[str, Any], now: float) -> None:
    """Cut off, of another release, written by hand, from the future: a bounded decision, which waits for its window."""
    history, _ = restore_history(status, replicas=4, now=now)
    spec = replace(DOWN, slo=Slo(time_to_first_token_ms=500))
    for _ in range(12):
        now += 8.0
        decision = decide(spec, IDLE, history, now)
        assert 4 <= decision.replicas <= 10
        history = decision.history
        json.dumps(remember(history, recommended=1), allow_nan=False)
