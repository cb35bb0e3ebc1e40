"""Laws of the scaling decision, for any fleet."""

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pagefleet_operator.autoscale import SETTLED_QUEUE_SECONDS, decide
from pagefleet_operator.fleet import Fleet, FleetPod, PodState, Sample
from pagefleet_operator.forecast import Point
from pagefleet_operator.history import Bucket, History
from pagefleet_operator.latency import Histogram, Latencies
from pagefleet_operator.memory import restore_history
from pagefleet_operator.model import AutoscalingSpec, ScalingPolicy, ScalingRules, Slo
from pagefleet_operator.standing import Shadow, Standing
from support.operator_objects import autoscaling

COUNTS = st.integers(0, 5000)
LAW = settings(deadline=None)  # other work on the machine is no failure


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    total = draw(st.integers(1, 2000))
    used = draw(st.integers(0, total))
    return Sample(
        time=0.0,
        blocks_used=used,
        blocks_cached=draw(st.integers(0, total - used)),
        blocks_total=total,
        blocks_waiting=draw(COUNTS),
        running=draw(st.integers(0, 300)),
        waiting=draw(st.integers(0, 300)),
        oldest_waiting_seconds=draw(st.floats(0, 100)),
    )


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    states = draw(st.lists(st.sampled_from(PodState), max_size=12))
    pods = [
        FleetPod(f"p{index}", state, draw(samples()) if state is PodState.READY and draw(st.booleans()) else None)
        for index, state in enumerate(states)
    ]
    return Fleet(replicas=draw(st.integers(0, 60)), pods=tuple(pods))


@st.composite
def rules(draw: st.DrawFn) -> ScalingRules:
    policies = st.builds(
        ScalingPolicy,
        type=st.sampled_from(["Pods", "Percent"]),
        value=st.integers(1, 200),
        period_seconds=st.integers(1, 1800),
    )
    return ScalingRules(
        stabilization_window_seconds=draw(st.integers(0, 3600)),
        select_policy=draw(st.sampled_from(["Max", "Min", "Disabled"])),
        policies=tuple(draw(st.lists(policies, min_size=1, max_size=3))),
    )


@st.composite
def specs(draw: st.DrawFn) -> AutoscalingSpec:
    minimum = draw(st.integers(1, 40))
    return AutoscalingSpec(
        max_replicas=draw(st.integers(minimum, 60)),
        min_replicas=minimum,
        kv_block_occupancy_percent=draw(st.integers(1, 100)),
        queued_requests_per_replica=draw(st.integers(1, 50)),
        scale_up=draw(rules()),
        scale_down=draw(rules()),
        slo=draw(
            st.none() | st.builds(Slo, percentile=st.integers(50, 99), time_to_first_token_ms=st.integers(1, 9999))
        ),
    )


STANDINGS = st.builds(
    Standing,
    replicas=st.integers(1, 100),
    seen=st.floats(0, 1e6),
    shadows=st.lists(st.builds(Shadow, st.integers(1, 100), st.floats(0, 1e6), st.floats(0, 1e6)), max_size=20).map(
        lambda items: tuple(sorted(items, key=lambda shadow: shadow.replicas))
    ),
    quiet=st.floats(0, 1000),
    longest_quiet=st.floats(0, 1000),
    step_start=st.none() | st.floats(900, 1100),
    step_sum=st.floats(0, 1000),
    step_rounds=st.integers(1, 10),
    step_order=st.integers(0, 100),
)


HISTORIES = st.builds(
    History,
    buckets=st.lists(st.builds(Bucket, start=st.floats(0, 1000), max_wanted=st.integers(1, 60)), max_size=12).map(
        lambda items: tuple(sorted(items, key=lambda bucket: bucket.start))
    ),
    saturation_running=st.none() | st.floats(1, 500),
    standing=STANDINGS,
)


@LAW
@given(specs(), fleets(), HISTORIES)
def test_replicas_stay_within_the_bounds(spec: AutoscalingSpec, fleet: Fleet, history: History) -> None:
    decision = decide(spec, fleet, history, 1000.0)
    if fleet.replicas == 0:
        assert decision.replicas == 0
    else:
        assert spec.min_replicas <= decision.replicas <= spec.max_replicas


@LAW
@given(specs(), fleets(), HISTORIES, st.integers(0, 80))
def test_replicas_stay_within_the_budget(spec: AutoscalingSpec, fleet: Fleet, history: History, allowance: int) -> None:
    free = decide(spec, fleet, history, 1000.0)
    bound = decide(spec, fleet, history, 1000.0, allowance=allowance)
    assert bound.unbudgeted == free.replicas
    if fleet.replicas == 0:
        assert bound.replicas == 0
    else:
        assert bound.replicas == min(free.replicas, max(1, allowance))
        assert (bound.limited_by == "DeviceBudget") == (bound.replicas < free.replicas)


@LAW
@given(specs(), fleets(), HISTORIES)
def test_what_load_needs_is_a_part_of_what_is_wanted(spec: AutoscalingSpec, fleet: Fleet, history: History) -> None:
    decision = decide(spec, fleet, history, 1000.0)
    assert min(decision.unbudgeted, spec.min_replicas) <= decision.needed <= decision.unbudgeted
    if not decision.active or decision.inputs.standing == 1:
        assert decision.needed >= min(decision.recommended, decision.unbudgeted), "nothing only stands ready"
    more = replace(history, standing=replace(history.standing, replicas=history.standing.replicas + 7))
    assert decide(spec, fleet, more, 1000.0).needed >= decision.needed or not decision.active


@LAW
@given(specs(), fleets(), HISTORIES)
def test_a_decision_is_a_function_of_its_inputs(spec: AutoscalingSpec, fleet: Fleet, history: History) -> None:
    assert decide(spec, fleet, history, 1000.0) == decide(spec, fleet, history, 1000.0)


WINDOWS = st.integers(0, 5000).map(
    lambda count: Latencies(time_to_first_token=Histogram((0.1, math.inf), (count / 2, float(count))))
)
PASTS = st.lists(st.tuples(st.floats(700, 1000), st.floats(0, 5000)), max_size=30).map(
    lambda items: tuple(Point(time, demand) for time, demand in sorted(items))
)


TURNOVERS = st.none() | st.floats(0.01, 1000)


@LAW
@given(fleets(), COUNTS, COUNTS, st.floats(1, 500), WINDOWS, PASTS, STANDINGS, st.data())
def test_more_demand_never_means_fewer_replicas(
    fleet: Fleet,
    more: int,
    used: int,
    knee: float,
    latencies: Latencies,
    past: tuple[Point, ...],
    standing: Standing,
    data: st.DataObject,
) -> None:
    fleet = replace(fleet, latencies=latencies)
    sampled = [index for index, pod in enumerate(fleet.pods) if pod.state is PodState.READY and pod.sample is not None]
    if not sampled or fleet.replicas == 0:
        return
    index = data.draw(st.sampled_from(sampled))
    pod = fleet.pods[index]
    assert pod.sample is not None
    room = pod.sample.blocks_total - pod.sample.blocks_used - pod.sample.blocks_cached
    fuller = replace(
        pod.sample,
        blocks_waiting=pod.sample.blocks_waiting + more,
        blocks_used=pod.sample.blocks_used + min(used, room),
    )
    if pod.sample.waiting and pod.sample.oldest_waiting_seconds >= SETTLED_QUEUE_SECONDS:  # no more to learn from it
        fuller = replace(fuller, waiting=fuller.waiting + more)
    busier = replace(pod, sample=fuller)
    crowded = replace(fleet, pods=(*fleet.pods[:index], busier, *fleet.pods[index + 1 :]))
    history = History(saturation_running=knee, demand=past, standing=standing, turnover_seconds=data.draw(TURNOVERS))
    spec = autoscaling(maximum=1000, slo=data.draw(st.none() | st.just(Slo(time_to_first_token_ms=500))))
    assert decide(spec, crowded, history, 1000.0).recommended >= decide(spec, fleet, history, 1000.0).recommended


@LAW
@given(st.integers(1, 50), st.floats(-0.1, 0.1), st.integers(10, 1000))
def test_nothing_happens_inside_the_tolerance(replicas: int, deviation: float, total: int) -> None:
    target = 0.8 * total
    used = round(target * (1 + deviation))
    if not target * 0.9 <= used <= min(total, target * 1.1):
        return
    sample = Sample(0.0, used, 0, total, 0, 1, 0)
    fleet = Fleet(replicas, tuple(FleetPod(f"p{index}", PodState.READY, sample) for index in range(replicas)))
    assert decide(autoscaling(maximum=1000), fleet, History(), 0.0).replicas == replicas


@LAW
@given(specs(), fleets(), HISTORIES, st.data())
def test_a_pod_that_falls_silent_never_lowers_the_recommendation_below_the_current_count(
    spec: AutoscalingSpec, fleet: Fleet, history: History, data: st.DataObject
) -> None:
    """Losing a sample may hide a need to grow, but never makes a fleet shrink further than it would have."""
    sampled = [index for index, pod in enumerate(fleet.pods) if pod.state is PodState.READY and pod.sample is not None]
    if not sampled or fleet.replicas == 0:
        return
    index = data.draw(st.sampled_from(sampled))
    pod = fleet.pods[index]
    # A pod that carries at most what the target allows: its silence is then counted as at least as much.
    assert pod.sample is not None
    same = replace(pod.sample, blocks_total=100, blocks_cached=0, blocks_used=0, blocks_waiting=0, running=0, waiting=0)
    others = [
        replace(item, sample=replace(item.sample, blocks_total=100, blocks_cached=0, blocks_used=50))
        if item.sample is not None
        else item
        for item in fleet.pods
    ]
    loud = replace(fleet, pods=(*others[:index], replace(pod, sample=same), *others[index + 1 :]))
    quiet_pod = FleetPod(pod.name, PodState.UNREACHABLE)
    quiet = replace(fleet, pods=(*others[:index], quiet_pod, *others[index + 1 :]))
    known = replace(history, saturation_running=None)
    heard, missed = decide(spec, loud, known, 1000.0), decide(spec, quiet, known, 1000.0)
    assert min(missed.recommended, fleet.replicas) >= min(heard.recommended, fleet.replicas)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 30), st.integers(0, 300), st.integers(1, 600))
def test_a_restart_never_shrinks_earlier(replicas: int, idle_before: int, window: int) -> None:
    """The restarted operator knows at most what the old one knew; what nobody watched counts as needed."""
    down = ScalingRules(window, "Max", (ScalingPolicy("Percent", 100, 15),))
    spec = autoscaling(maximum=60, scale_down=down)
    idle = Fleet(
        replicas, tuple(FleetPod(f"p{i}", PodState.READY, Sample(0.0, 0, 0, 100, 0, 0, 0)) for i in range(replicas))
    )
    start = 1_000_000.0
    kept = History().recommended(replicas, now=start, window_seconds=float(window))
    now = start
    for now in range(int(start) + 2, int(start) + 2 + idle_before, 2):
        kept = decide(spec, idle, kept, float(now)).history
    restored, _ = restore_history({}, replicas=replicas, now=float(now))
    for later in range(int(now), int(now) + window + 60, 2):
        kept_decision = decide(spec, idle, kept, float(later))
        restored_decision = decide(spec, idle, restored, float(later))
        kept, restored = kept_decision.history, restored_decision.history
        assert restored_decision.replicas >= kept_decision.replicas
