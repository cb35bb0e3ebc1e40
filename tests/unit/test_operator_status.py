"""Conditions, phases, and what is worth a write."""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pagefleet_operator.autoscale import Decision, Inputs, decide
from pagefleet_operator.conditions import Facts, judge
from pagefleet_operator.errors import SpecError
from pagefleet_operator.history import History
from pagefleet_operator.latency import Histogram, Latencies
from pagefleet_operator.objective import Verdict
from pagefleet_operator.parsing import parse
from pagefleet_operator.plan import Plan
from pagefleet_operator.status import difference, is_urgent, render, render_invalid
from pagefleet_operator.times import timestamp
from pagefleet_operator.transitions import transitions
from support.operator_facts import NOW, deployment, facts
from support.operator_objects import autoscaling, fleet, llmd_body, pod_body, sample


def holds(judged: Facts) -> dict[str, tuple[bool, str]]:
    return {verdict.type: (verdict.status, verdict.reason) for verdict in judge(judged)}


@dataclass(frozen=True)
class Case:
    name: str
    facts: Facts
    available: str
    progressing: str
    degraded: str
    phase: str


QUOTA = [{"type": "ReplicaFailure", "status": "True", "message": 'pods "x" is forbidden: exceeded quota: gpus'}]
STALLED = [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]
TWO = {"replicas": 2}
CASES = [
    Case("all well", facts(pod_body("a")), "ReplicasReady", "Complete", "AsExpected", "Available"),
    Case("first start", facts(pod_body("a", ready=False)), "NoReadyReplicas", "Starting", "AsExpected", "Starting"),
    Case("scaled to zero", facts(spec={"replicas": 0}), "ScaledToZero", "Complete", "AsExpected", "Stopped"),
    Case("growing", facts(pod_body("a"), spec=TWO), "ReplicasReady", "ScalingUp", "AsExpected", "Scaling"),
    Case("shrinking", facts(pod_body("a"), pod_body("b")), "ReplicasReady", "ScalingDown", "AsExpected", "Scaling"),
    Case(
        "new template",
        facts(pod_body("a"), pod_body("b"), spec=TWO, child=deployment(2, updated=1)),
        *("ReplicasReady", "RollingOut", "AsExpected", "Scaling"),
    ),
    Case(
        "crash loop",
        facts(pod_body("a", ready=False, waiting=("CrashLoopBackOff", "back-off"), last_exit=(1, "no port"))),
        *("NoReadyReplicas", "Starting", "CrashLoop", "Degraded"),
    ),
    Case(
        "no such model",
        facts(pod_body("a", ready=False, waiting=("CrashLoopBackOff", "back-off"), last_exit=(3, "no model"))),
        *("NoReadyReplicas", "Starting", "ModelUnusable", "Degraded"),
    ),
    Case(
        "a download",
        facts(pod_body("a", ready=False), progress={"a": 42}),
        *("NoReadyReplicas", "Downloading", "AsExpected", "Starting"),
    ),
    Case(
        "a spec that may not run here",
        facts(pod_body("a"), plan=Plan(refusal=("CacheNotShared", "the claim c has ReadWriteOnce"))),
        *("ReplicasReady", "Complete", "CacheNotShared", "Degraded"),
    ),
    Case(
        "crashed once and running again",
        facts(pod_body("a", ready=False, last_exit=(139, ""))),
        *("NoReadyReplicas", "Starting", "CrashLoop", "Degraded"),
    ),
    Case(
        "crashed once and recovered",
        facts(pod_body("a", last_exit=(1, "x"))),
        *("ReplicasReady", "Complete", "AsExpected", "Available"),
    ),
    Case(
        "no image",
        facts(pod_body("a", ready=False, waiting=("ImagePullBackOff", "not found"))),
        *("NoReadyReplicas", "Starting", "ImagePullFailed", "Degraded"),
    ),
    Case(
        "no room",
        facts(pod_body("a", ready=False, unschedulable="0/3 nodes: insufficient nvidia.com/gpu")),
        *("NoReadyReplicas", "Starting", "Unschedulable", "Degraded"),
    ),
    Case(
        "quota",
        facts(pod_body("a"), spec=TWO, child=deployment(2, updated=2, conditions=QUOTA)),
        *("ReplicasReady", "ScalingUp", "QuotaExceeded", "Degraded"),
    ),
    Case(
        "stalled",
        facts(pod_body("a", ready=False), child=deployment(1, conditions=STALLED)),
        *("NoReadyReplicas", "Starting", "RolloutStalled", "Degraded"),
    ),
    Case(
        "silent pod",
        facts(pod_body("a"), silent={"a": "no metrics within 1 s"}),
        *("ReplicasReady", "Complete", "MetricsUnreachable", "Degraded"),
    ),
    Case(
        "name conflict",
        facts(plan=Plan(conflicts=("Service chat",)), child={"metadata": {}}),
        *("NameConflict", "RollingOut", "NameConflict", "Degraded"),
    ),
    Case(
        "refused by the API",
        facts(pod_body("a"), apply_failure=("InvalidTemplate", "spec.x: bad")),
        *("ReplicasReady", "Complete", "InvalidTemplate", "Degraded"),
    ),
    Case(
        "contested",
        facts(pod_body("a"), contested="Deployment chat was changed back 3 times"),
        *("ReplicasReady", "Complete", "FieldContested", "Degraded"),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conditions_and_phase(case: Case) -> None:
    found = holds(case.facts)
    reasons = tuple(found[kind][1] for kind in ("Available", "Progressing", "Degraded"))
    assert reasons == (case.available, case.progressing, case.degraded)
    assert found["Available"][0] is (case.available == "ReplicasReady")
    assert found["Progressing"][0] is (case.progressing != "Complete")
    assert found["Degraded"][0] is (case.degraded != "AsExpected")
    assert render(case.facts, History(), [], NOW)["phase"] == case.phase


@pytest.mark.parametrize("case", [case for case in CASES if case.degraded != "AsExpected"], ids=lambda case: case.name)
def test_a_message_says_what_to_do(case: Case) -> None:
    (verdict,) = [verdict for verdict in judge(case.facts) if verdict.type == "Degraded"]
    if case.facts.contested or case.facts.plan.refusal:
        return  # made elsewhere
    told = verdict.message.lower()
    assert re.search(r"\b(see|correct|set|change|add|raise|lower|let|delete|undo|apply|create)\b", told), told
    assert len(told) < 1024


def scaled(decision: Decision | None, **fields: Any) -> dict[str, tuple[bool, str]]:
    return holds(facts(pod_body("a"), spec={"autoscaling": {"maxReplicas": 3}}, decision=decision, **fields))


def test_scaling_conditions_say_what_limits() -> None:
    full = decide(autoscaling(maximum=2), fleet(1, sample(used=100, waiting_blocks=900)), History(), NOW)
    found = scaled(full)
    assert found["ScalingActive"] == (True, "ValidMetricFound")
    assert found["ScalingLimited"] == (True, "TooManyReplicas")
    assert found["AbleToScale"] == (True, "ReadyForNewScale")
    assert scaled(None)["ScalingActive"] == (False, "NoDecisionYet")
    assert scaled(replace(full, active=False, reason="FailedGetMetrics"))["ScalingActive"] == (
        False,
        "FailedGetMetrics",
    )
    assert scaled(full, scale_failure="403")["AbleToScale"] == (False, "FailedUpdateScale")
    assert scaled(full, overwritten="was 7")["AbleToScale"] == (True, "ReplicasOverwritten")
    assert scaled(replace(full, limited_by="ScaleDownStabilized"))["AbleToScale"] == (True, "ScaleDownStabilized")


def test_without_autoscaling_there_are_no_scaling_conditions() -> None:
    assert list(holds(facts(pod_body("a")))) == ["Available", "Progressing", "Degraded"]


def test_transition_times_change_only_with_the_status() -> None:
    first = render(facts(pod_body("a", ready=False)), History(), [], NOW)
    second = render(facts(pod_body("a", ready=False), status=first), History(), [], NOW + 60)
    assert second == first
    ready = render(facts(pod_body("a"), status=first), History(), [], NOW + 60)
    available = {item["type"]: item["lastTransitionTime"] for item in ready["conditions"]}
    assert available["Available"] == timestamp(NOW + 60)
    assert available["Degraded"] == timestamp(NOW)


def test_numbers_move_in_steps_of_one_percent_and_always_to_and_from_zero() -> None:
    def blocks(used: int, last: dict[str, Any] | None) -> dict[str, Any]:
        status = {"kvBlocks": last} if last else None
        made = facts(pod_body("a"), samples={"a": sample(used=used, total=10_000)}, status=status)
        found: dict[str, Any] = render(made, History(), [], NOW)["kvBlocks"]
        return found

    first = blocks(5000, None)
    assert (first["occupancy"], first["summary"]) == ("50%", "5000/10000")
    assert blocks(5020, first) is not first
    assert blocks(5020, first) == first
    assert blocks(5101, first)["summary"] == "5101/10000"
    tiny = blocks(3, None)
    assert blocks(0, tiny)["summary"] == "0/10000"


def test_only_what_differs_is_written_and_numbers_can_wait() -> None:
    last = render(facts(pod_body("a"), samples={"a": sample(used=10)}), History(), [], NOW)
    more = render(facts(pod_body("a"), samples={"a": sample(used=40)}, status=last), History(), [], NOW)
    patch = difference(more, last)
    assert set(patch) == {"kvBlocks", "pods"}
    assert not is_urgent(patch, last)
    gone = render(facts(pod_body("a", ready=False), status=last), History(), [], NOW)
    patch = difference(gone, last)
    assert patch["kvBlocks"] is None
    assert is_urgent(patch, last)
    assert difference(last, last) == {}


def test_a_download_is_shown_and_its_progress_alone_is_not_urgent() -> None:
    starting = pod_body("a", ready=False)
    before = render(facts(starting, progress={"a": 41}), History(), [], NOW)
    assert before["pods"][0]["progress"] == "Downloading 41 %"
    (progressing,) = [item for item in before["conditions"] if item["type"] == "Progressing"]
    assert progressing["message"] == "0 of 1 replicas are ready, 1 download the model: 41 %"
    after = render(facts(starting, progress={"a": 42}, status=before), History(), [], NOW + 60)
    patch = difference(after, before)
    assert set(patch) == {"conditions", "pods"}
    assert not is_urgent(patch, before)


def test_an_invalid_spec_keeps_the_rest_of_the_status() -> None:
    body = llmd_body(spec={"replicas": -1}, generation=4, status={"ready": "1/1", "conditions": []})
    with pytest.raises(SpecError) as error:
        parse(body)
    status = render_invalid(body, error.value, NOW)
    assert (status["phase"], status["reason"], status["ready"]) == ("Invalid", "InvalidSpec", "1/1")
    assert status["observedGeneration"] == 4
    assert "spec.replicas: -1 must be between 0 and 1000" in status["conditions"][0]["message"]


def test_events_are_said_on_turns_only() -> None:
    starting = render(facts(pod_body("a", ready=False)), History(), [], NOW)
    assert list(transitions({}, starting)) == []
    ready = render(facts(pod_body("a"), status=starting), History(), [], NOW)
    assert [item.reason for item in transitions(starting, ready)] == ["Available"]
    crashed_pod = pod_body("a", ready=False, waiting=("CrashLoopBackOff", ""), last_exit=(1, "no port"))
    crashed = render(facts(crashed_pod, status=ready), History(), [], NOW)
    said = list(transitions(ready, crashed))
    assert [(item.reason, item.warning) for item in said] == [("NoReadyReplicas", True), ("CrashLoop", True)]
    assert said[1].message == "pod a: exit code 1: no port; see kubectl logs --previous"
    assert [item.reason for item in transitions(crashed, ready)] == ["Available", "Recovered"]
    assert list(transitions(ready, ready)) == []


def test_latencies_are_shown_to_two_digits_with_the_share_within_the_objective() -> None:
    bounds = (0.1, 0.5, 1.0, math.inf)
    seen = Latencies(time_to_first_token=Histogram(bounds, (0, 90, 100, 100)))
    spec = {"autoscaling": {"maxReplicas": 3, "slo": {"timeToFirstTokenMilliseconds": 500}}}
    shown = render(facts(pod_body("a"), spec=spec, latencies=seen), History(), [], NOW)["slo"]
    assert shown == {"timeToFirstTokenMilliseconds": 750, "attainment": "90%"}
    without = render(facts(pod_body("a"), latencies=seen), History(), [], NOW)["slo"]
    assert without == {"timeToFirstTokenMilliseconds": 750}
    assert render(facts(pod_body("a")), History(), [], NOW)["slo"] is None


def test_a_dry_run_says_so() -> None:
    spec = {"autoscaling": {"maxReplicas": 3, "mode": "DryRun"}}
    assert holds(facts(pod_body("a"), spec=spec))["AbleToScale"] == (False, "DryRun")


def test_the_objective_has_its_own_condition() -> None:
    spec = {"autoscaling": {"maxReplicas": 3, "slo": {"timeToFirstTokenMilliseconds": 500}}}
    assert holds(facts(pod_body("a"), spec=spec))["SLOMet"] == (True, "TooFewSamples")
    for reason, met in (("ObjectiveMissed", False), ("ObjectiveNotCapacityBound", False), ("ObjectiveMet", True)):
        inputs = Inputs(objective=Verdict(None, met=met, reason=reason))
        decision = Decision(1, 1, 1, 1, True, "KVBlocks", "", None, inputs, History())
        assert holds(facts(pod_body("a"), spec=spec, decision=decision))["SLOMet"] == (met, reason)


def test_a_new_operator_says_of_scaling_what_was_said_until_it_has_decided() -> None:
    """Each restart turned ScalingActive and SLOMet over and back, with a warning for every object."""
    spec = {"autoscaling": {"maxReplicas": 3, "slo": {"timeToFirstTokenMilliseconds": 500}}}
    said = {
        "ScalingActive": ("True", "ValidMetricFound"),
        "AbleToScale": ("True", "ScaleDownStabilized"),
        "ScalingLimited": ("True", "DeviceBudget"),
        "SLOMet": ("False", "ObjectiveMissed"),
    }
    conditions = [
        {"type": kind, "status": status, "reason": reason, "message": "as it was", "lastTransitionTime": "x"}
        for kind, (status, reason) in said.items()
    ]
    made = facts(pod_body("a"), spec=spec)
    anew = replace(made, llmd=replace(made.llmd, status={"conditions": conditions}))
    rendered = render(anew, History(), [], NOW)
    found = {item["type"]: (item["status"], item["reason"]) for item in rendered["conditions"]}
    assert {kind: found[kind] for kind in said} == said
    kinds = [transition.reason for transition in transitions(anew.llmd.status, rendered)]
    assert not {"NoDecisionYet", "ValidMetricFound"} & set(kinds)
    first = render(made, History(), [], NOW)
    assert {item["type"]: item["reason"] for item in first["conditions"]}["ScalingActive"] == "NoDecisionYet"


def test_a_scale_that_fails_is_said_before_the_first_decision_too() -> None:
    made = facts(pod_body("a"), spec={"autoscaling": {"maxReplicas": 3}})
    known = {"type": "AbleToScale", "status": "True", "reason": "ReadyForNewScale", "message": "m"}
    failing = replace(made, scale_failure="403", llmd=replace(made.llmd, status={"conditions": [known]}))
    verdict = next(item for item in judge(failing) if item.type == "AbleToScale")
    assert (verdict.status, verdict.reason) == (False, "FailedUpdateScale")
