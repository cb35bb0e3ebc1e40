"""What an operator knows again after a restart, from the status alone."""

from dataclasses import replace
from typing import Any

import pytest

from pagefleet_localcluster.api.validation import validate
from pagefleet_operator.autoscale import Decision, Inputs, decide
from pagefleet_operator.forecast import start_seconds
from pagefleet_operator.history import History
from pagefleet_operator.latency import LatencyWindow
from pagefleet_operator.memory import restore_history
from pagefleet_operator.metrics_text import MAX_COUNT, parse_sample
from pagefleet_operator.standing import Shadow, Standing
from pagefleet_operator.status import render
from pagefleet_operator.times import timestamp
from support.operator_crd import STATUS
from support.operator_facts import NOW, facts
from support.operator_objects import fleet, metrics_text, pod_body, sample


def test_history_survives_a_restart() -> None:
    history = History(saturation_running=7.6).recommended(5, now=NOW - 100, window_seconds=300)
    decision = Decision(3, 2, 3, 3, True, "KVBlocks", "", None, Inputs(), history)
    change = {"time": timestamp(NOW - 50), "from": 3, "to": 5, "inputs": "", "reason": "KVBlocks"}
    made = facts(pod_body("a"), spec={"autoscaling": {"maxReplicas": 9}}, decision=decision)
    status = render(made, history, [change], NOW)
    restored, decisions = restore_history(status, replicas=3, now=NOW)
    assert restored.max_since(NOW, window_seconds=300, bucket_window_seconds=300) == 5
    assert restored.saturation_running == 8
    assert restored.added_since(NOW - 60, now=NOW) == 2
    assert decisions == [change]
    assert status["autoscaling"]["lastScaleTime"] == change["time"]


def test_a_damaged_history_is_left_out() -> None:
    status = {"autoscaling": {"history": {"buckets": [{"start": "yesterday", "maxWanted": 9}]}, "decisions": [{}]}}
    restored, decisions = restore_history(status, replicas=2, now=NOW)
    assert [bucket.max_wanted for bucket in restored.buckets] == [2]
    assert decisions == []


def test_a_clock_that_went_back_leaves_no_bucket_in_the_future() -> None:
    status = {"autoscaling": {"history": {"buckets": [{"start": timestamp(NOW + 999), "maxWanted": 9}]}}}
    restored, _ = restore_history(status, replicas=2, now=NOW)
    assert [bucket.max_wanted for bucket in restored.buckets] == [2]


def test_what_was_learnt_of_the_load_survives_a_restart() -> None:
    """Without its turnover a new operator counted all of an old queue as demand, and grew for a backlog."""
    made = facts(pod_body("a"), spec={"autoscaling": {"maxReplicas": 3}})
    learnt = History(turnover_seconds=12.34, saturation_running=7.6)
    status = render(made, learnt, [], NOW)
    assert status["autoscaling"]["history"]["turnoverMilliseconds"] == 12000
    restored, _ = restore_history(status, replicas=1, now=NOW)
    assert (restored.turnover_seconds, restored.saturation_running) == (12.0, 8.0)
    again = render(made, restored, [], NOW)
    assert again["autoscaling"]["history"] == status["autoscaling"]["history"], "nothing is written for a restart"


def test_an_old_queue_is_no_demand_after_a_restart_either() -> None:
    """128 requests wait for ten minutes on one replica; new replicas could not take them over."""
    made = facts(pod_body("a"), spec={"autoscaling": {"maxReplicas": 64}})
    spec = made.llmd.spec.autoscaling
    assert spec is not None
    old = sample(used=90, waiting_blocks=1280, running=9, waiting=128, oldest=600.0)
    status = render(made, History(turnover_seconds=10.0), [], NOW)
    for memory in (History(turnover_seconds=10.0), restore_history(status, replicas=1, now=NOW)[0]):
        assert decide(spec, fleet(1, old), memory, NOW).replicas <= 2
    forgetful = decide(spec, fleet(1, old), History(), NOW).replicas
    assert forgetful > 2, "this is what the restart would have ordered"


@pytest.mark.parametrize("turnover", [0, -5, 1, 10**12])
def test_a_damaged_turnover_does_no_harm(turnover: int) -> None:
    status = {"autoscaling": {"history": {"turnoverMilliseconds": turnover}}}
    restored, _ = restore_history(status, replicas=1, now=NOW)
    assert restored.turnover_seconds is None or 0 < restored.turnover_seconds < 1e9


def test_measured_start_up_times_survive_a_restart() -> None:
    made = facts(pod_body("a"), spec={"autoscaling": {"maxReplicas": 3}})
    status = render(made, History(starts=(("a", 31.4), ("b", 12.0))), [], NOW)
    assert status["autoscaling"]["history"]["startupSecondsP90"] == 31
    restored, _ = restore_history(status, replicas=1, now=NOW)
    assert start_seconds(restored.starts) == 31.0


def test_what_must_stand_ready_survives_a_restart() -> None:
    shadows = (Shadow(0, late=500.0), Shadow(1, late=600.0, backlog=7.0), Shadow(2, late=57.0), Shadow(3))
    learnt = History(standing=Standing(3, 1234.0, shadows, orders=(1.0, 2.5), longest_quiet=180.0))
    made = facts(pod_body("a"), spec={"autoscaling": {"maxReplicas": 3}})
    status = render(made, learnt, [], NOW)
    assert status["autoscaling"]["history"]["standing"] == {
        "replicas": 3,
        "seenReplicaMinutes": 210,
        "longestQuietMinutes": 30,
        "late": [
            {"replicas": 0, "permille": 405},
            {"replicas": 1, "permille": 486},
            {"replicas": 2, "permille": 46},
        ],
    }
    restored, _ = restore_history(status, replicas=1, now=NOW)
    assert restored.standing.replicas == restored.standing.needed(0.05) == 3
    assert restored.standing.longest_quiet == 180.0
    assert render(made, restored, [], NOW)["autoscaling"] == status["autoscaling"], "nothing is written for a restart"


def test_a_damaged_standing_count_is_bounded() -> None:
    late = [{"replicas": -1, "permille": 9}, {"replicas": 2, "permille": -1}, {"replicas": 4, "permille": 10**9}]
    status = {
        "autoscaling": {
            "history": {"standing": {"replicas": -3, "seenReplicaMinutes": -9, "longestQuietMinutes": -5, "late": late}}
        }
    }
    restored, _ = restore_history(status, replicas=1, now=NOW)
    assert restored.standing == Standing(replicas=1, seen=0.0, shadows=(Shadow(1),))


@pytest.mark.parametrize("oldest", [0.0, 1.0, float(MAX_COUNT)])
def test_the_api_takes_the_status_whatever_a_pod_says(oldest: float) -> None:
    """A recommendation beyond an int32 was refused, and with it the whole status, as long as its bucket counted."""
    most: dict[str, float] = {"used": MAX_COUNT, "total": MAX_COUNT, "waiting_blocks": MAX_COUNT, "waiting": MAX_COUNT}
    slo = {"timeToFirstTokenMilliseconds": 500, "interTokenLatencyMilliseconds": 1}
    spec = {"autoscaling": {"maxReplicas": 1000, "slo": slo, "targets": {"kvBlockOccupancyPercent": 1}}}
    window, history, made = LatencyWindow(), History(), facts(pod_body("a"), spec=spec)
    assert made.llmd.spec.autoscaling is not None
    for step in range(60):
        text = metrics_text(**most, running=MAX_COUNT, oldest=oldest) + _histograms(1000 * step)
        tiny = parse_sample(metrics_text(total=1, waiting_blocks=MAX_COUNT), time=NOW + 8 * step)
        one = parse_sample(text, time=NOW + 8 * step)
        seen = window.observe({"a": (one.time, one.latencies)}, one.time)
        pods = replace(fleet(3, one, tiny, tiny), latencies=seen)
        decision = decide(made.llmd.spec.autoscaling, pods, history, one.time)
        history = decision.history
        known = replace(
            made, decision=decision, latencies=seen, observed=replace(made.observed, samples={"a": one, "b": tiny})
        )
        change = {"time": timestamp(NOW), "from": 3, "to": 9, "inputs": str(decision.inputs), "reason": "KVBlocks"}
        status = {key: value for key, value in render(known, history, [change], NOW).items() if value is not None}
        assert [cause.message for cause in validate(status, STATUS)] == []
        assert all(abs(number) < 2**63 for number in _numbers(status)), status


def _histograms(count: int) -> str:
    lines = ["# TYPE vllm:time_to_first_token_seconds histogram"]
    lines += [f'vllm:time_to_first_token_seconds_bucket{{le="{le}"}} {count}' for le in (float(MAX_COUNT), "+Inf")]
    return "\n".join([*lines, f"vllm:time_to_first_token_seconds_count {count}", ""])


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return [number for item in items for number in _numbers(item)]
    return [value] if isinstance(value, int | float) else []
