"""The scaling decision, case by case."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from pagefleet_operator.autoscale import decide
from pagefleet_operator.fleet import Fleet, Sample
from pagefleet_operator.history import Bucket, Change, History
from pagefleet_operator.model import ScalingPolicy, ScalingRules
from support.operator_objects import autoscaling, fleet, sample

NO_WINDOW = ScalingRules(0, "Max", (ScalingPolicy("Percent", 100, 15),))
FAST_UP = ScalingRules(0, "Max", (ScalingPolicy("Pods", 100, 1),))


@dataclass(frozen=True)
class Case:
    name: str
    fleet: Fleet
    want: int
    history: History = field(default_factory=History)
    want_reason: str | None = None
    want_limit: str | None = None
    want_active: bool = True
    spec: dict[str, Any] = field(default_factory=dict)


FULL = sample(used=100, total=100)
IDLE = sample()
HALF = sample(used=40)
CASES = [
    Case("at target nothing happens", fleet(2, sample(used=80), sample(used=80)), 2, want_reason="WithinTolerance"),
    Case("inside the tolerance nothing happens", fleet(2, sample(used=87), sample(used=87)), 2),
    Case("beyond the tolerance it grows", fleet(1, sample(used=90)), 2, want_reason="KVBlocks"),
    Case("waiting blocks count: one step to what is needed", fleet(1, sample(used=100, waiting_blocks=300)), 5),
    Case(
        "replicas that start are capacity: no second scale-up for the same queue",
        fleet(5, sample(used=100, waiting_blocks=300), starting=4),
        5,
    ),
    Case("an idle fleet shrinks to the minimum", fleet(4, IDLE, IDLE, IDLE, IDLE), 1),
    Case(
        "never below the minimum", fleet(4, IDLE, IDLE, IDLE, IDLE), 2, spec={"minimum": 2}, want_limit="TooFewReplicas"
    ),
    Case(
        "never above the maximum", fleet(1, sample(used=100, waiting_blocks=10_000)), 10, want_limit="TooManyReplicas"
    ),
    Case("what remains after a shrink must have room", fleet(2, sample(used=33), sample(used=33)), 2),
    Case("a shrink that fits goes ahead", fleet(2, sample(used=31), sample(used=31)), 1),
    Case("a silent pod counts as full when shrinking", fleet(4, IDLE, IDLE, IDLE, None), 2),
    Case("a silent pod counts as idle when growing", fleet(2, FULL, None), 2),
    Case("real need beside a silent pod still grows", fleet(2, sample(used=100, waiting_blocks=200), None), 4),
    Case("mostly silent fleets never shrink", fleet(5, IDLE, None, None, starting=2), 5, want_reason="MetricsMissing"),
    Case("no sample at all holds", fleet(3, None, None, None), 3, want_reason="FailedGetMetrics", want_active=False),
    Case("no ready pod holds", fleet(3, starting=3), 3, want_reason="NoReadyPods", want_active=False),
    Case("no ready pod still honours the bounds", fleet(20, starting=20), 10, want_active=False),
    Case("zero replicas switch scaling off", fleet(0), 0, want_reason="ScalingDisabled", want_active=False),
    Case(
        "a queue beyond the known knee grows although blocks are free",
        fleet(1, sample(used=10, running=4, waiting=14, oldest=3.0)),
        2,
        want_reason="Queue",
    ),
    Case("a request just arriving teaches no knee", fleet(1, sample(used=10, running=1, waiting=14, oldest=0.1)), 1),
    Case("few blocks never mean more than the queue needs", fleet(1, sample(used=2, running=2)), 1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decision(case: Case) -> None:
    spec = autoscaling(**{"scale_up": FAST_UP, "scale_down": NO_WINDOW, **case.spec})
    decision = decide(spec, case.fleet, case.history, now=1000.0)
    assert decision.replicas == case.want
    assert decision.active is case.want_active
    if case.want_reason is not None:
        assert decision.reason == case.want_reason
    if case.want_limit is not None:
        assert decision.limited_by == case.want_limit


def test_shrinking_waits_for_the_whole_window() -> None:
    spec = autoscaling(scale_up=FAST_UP, scale_down=ScalingRules(60, "Max", NO_WINDOW.policies))
    history, replicas, now = History(), 3, 0.0
    busy: list[Sample | None] = [sample(used=80), sample(used=80), sample(used=80)]
    decision = decide(spec, fleet(replicas, *busy), history, now)
    shrunk_at = None
    while shrunk_at is None:
        now += 2
        decision = decide(spec, fleet(replicas, IDLE, IDLE, IDLE), decision.history, now)
        if decision.replicas < replicas:
            shrunk_at = now
        else:
            assert decision.limited_by == "ScaleDownStabilized"
    assert 60 <= shrunk_at <= 60 + 60 / 12 + 2


def test_a_peak_inside_the_window_holds_its_count() -> None:
    spec = autoscaling(scale_up=FAST_UP, scale_down=ScalingRules(60, "Max", NO_WINDOW.policies))
    first = decide(spec, fleet(4, *[sample(used=50)] * 4), History(), 0.0)
    assert first.recommended == 4
    lower = decide(spec, fleet(4, IDLE, IDLE, IDLE, IDLE), first.history, 30.0)
    assert (lower.recommended, lower.replicas) == (1, 4)


def test_growing_waits_for_the_scale_up_window() -> None:
    up = ScalingRules(30, "Max", FAST_UP.policies)
    spec = autoscaling(scale_up=up, scale_down=NO_WINDOW)
    calm = decide(spec, fleet(1, IDLE), History(), 0.0)
    held = decide(spec, fleet(1, FULL), calm.history, 20.0)
    assert (held.replicas, held.limited_by) == (1, "ScaleUpStabilized")
    grown = held
    for now in range(22, 60, 2):
        grown = decide(spec, fleet(1, FULL), grown.history, float(now))
    assert grown.replicas == 2


@pytest.mark.parametrize(
    ("rules", "want"),
    [
        (ScalingRules(0, "Max", (ScalingPolicy("Pods", 2, 60), ScalingPolicy("Percent", 100, 60))), 8),
        (ScalingRules(0, "Min", (ScalingPolicy("Pods", 2, 60), ScalingPolicy("Percent", 100, 60))), 6),
        (ScalingRules(0, "Disabled", (ScalingPolicy("Pods", 2, 60),)), 4),
    ],
    ids=["Max takes the larger", "Min takes the smaller", "Disabled never grows"],
)
def test_scale_up_policies(rules: ScalingRules, want: int) -> None:
    spec = autoscaling(maximum=100, scale_up=rules)
    crowd = fleet(4, *[sample(used=100, waiting_blocks=1000)] * 4)
    decision = decide(spec, crowd, History(), 0.0)
    assert decision.replicas == want
    assert decision.limited_by == "ScaleUpLimit"


def test_policies_count_what_was_added_within_the_period() -> None:
    rules = ScalingRules(0, "Max", (ScalingPolicy("Pods", 4, 60),))
    spec = autoscaling(maximum=100, scale_up=rules)
    crowd = fleet(6, *[sample(used=100, waiting_blocks=1000)] * 6)
    recent = History(changes=(Change(970.0, 3),))
    assert decide(spec, crowd, recent, 1000.0).replicas == 7
    assert decide(spec, crowd, recent, 1031.0).replicas == 10


def test_scale_down_policies_limit_the_pace() -> None:
    rules = ScalingRules(0, "Max", (ScalingPolicy("Pods", 1, 60),))
    spec = autoscaling(scale_down=rules)
    decision = decide(spec, fleet(5, *[IDLE] * 5), History(), 0.0)
    assert (decision.replicas, decision.limited_by) == (4, "ScaleDownLimit")


def test_the_knee_is_learnt_and_raised_by_what_runs() -> None:
    history = History()
    spec = autoscaling()
    decision = decide(spec, fleet(1, sample(running=8, waiting=2, oldest=2.0)), history, 0.0)
    assert decision.history.saturation_running == 8
    decision = decide(spec, fleet(1, sample(running=12)), decision.history, 2.0)
    assert decision.history.saturation_running == 12


def test_old_buckets_are_forgotten_and_their_number_is_bounded() -> None:
    history = History(buckets=(Bucket(0.0, 9),))
    for step in range(1000):
        history = history.recommended(1, now=1000.0 + step, window_seconds=300.0)
    assert len(history.buckets) <= 13
    assert history.max_since(1999.0, window_seconds=300, bucket_window_seconds=300) == 1


def test_the_decision_names_its_numbers() -> None:
    decision = decide(autoscaling(), fleet(1, sample(used=61, waiting_blocks=7, running=3, waiting=1)), History(), 0.0)
    assert decision.message == (
        "demand 68 blocks (now 61 used + 7 waiting), 80 per replica at target; 3 running, 1 waiting; 1 pods sampled; "
        "wanted: KVBlocks 1"
    )
