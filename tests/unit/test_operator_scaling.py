"""The autoscaler between two decisions."""

from dataclasses import replace
from typing import Any

from pagefleet_operator.memory import remember
from pagefleet_operator.plan import Observed
from pagefleet_operator.pods import parse_pod
from pagefleet_operator.scaling import Scaling
from support.operator_objects import llmd, pod_body, sample

CREATED, READY = "2026-01-01T00:00:00Z", "2026-01-01T00:00:42Z"


def pod(name: str, *, ready: bool, since: str = READY) -> dict[str, Any]:
    body = pod_body(name, ready=ready, created=CREATED)
    body["status"]["conditions"][0]["lastTransitionTime"] = since
    return body


def observed(*pods: dict[str, Any]) -> Observed:
    parsed = tuple(parse_pod(body) for body in pods)
    return Observed(pods=parsed, samples={item.name: sample(used=10) for item in parsed if item.ready})


SPEC = {"autoscaling": {"maxReplicas": 5, "targets": {"kvBlockOccupancyPercent": 80}}}
AUTOSCALED = llmd(spec=SPEC)


FULL = Observed(pods=(parse_pod(pod("a", ready=True)),), samples={"a": sample(used=100, waiting_blocks=100)})


def test_it_decides_once_per_scrape_round_and_the_decision_stands_until_it_is_written_or_given_up() -> None:
    """One that had to wait for its turn to be written was forgotten."""
    scaling = Scaling()
    first = scaling.decide(AUTOSCALED, FULL, scrape_round=1, now=0.0)
    assert first is not None
    assert first.replicas == 3
    assert scaling.decide(AUTOSCALED, FULL, scrape_round=1, now=0.5) is first
    scaling.scaled(AUTOSCALED, first, 0.6)
    assert scaling.decide(AUTOSCALED, FULL, scrape_round=1, now=0.7) is None
    assert scaling.decide(AUTOSCALED, FULL, scrape_round=2, now=2.0) is not None
    scaling.gave_up("503")
    assert (scaling.failure, scaling.decide(AUTOSCALED, FULL, scrape_round=2, now=2.5)) == ("503", None)


def test_a_decision_that_waits_is_dropped_when_it_has_come_true_or_others_have_the_devices() -> None:
    scaling = Scaling()
    assert scaling.decide(AUTOSCALED, FULL, scrape_round=1, now=0.0, allowance=lambda _: 5) is not None
    assert scaling.decide(AUTOSCALED, FULL, scrape_round=1, now=0.5, allowance=lambda _: 2) is None
    assert scaling.decide(AUTOSCALED, FULL, scrape_round=1, now=0.6, allowance=lambda _: 5) is None
    assert scaling.decide(AUTOSCALED, FULL, scrape_round=2, now=2.0) is not None
    assert scaling.decide(llmd(spec={**SPEC, "replicas": 3}), FULL, scrape_round=2, now=2.5) is None


def test_start_up_is_measured_of_pods_seen_starting() -> None:
    scaling = Scaling()
    scaling.decide(AUTOSCALED, observed(pod("a", ready=False)), scrape_round=1, now=0.0)
    scaling.decide(AUTOSCALED, observed(pod("a", ready=True)), scrape_round=2, now=2.0)
    assert scaling.history.starts == (("a", 42.0),)


def test_a_pod_that_came_back_days_later_teaches_no_start_up_time() -> None:
    """Its Ready condition turned long after its creation: as a start-up time that would be days."""
    scaling = Scaling()
    scaling.decide(AUTOSCALED, observed(pod("a", ready=True, since="2026-01-09T00:00:00Z")), scrape_round=1, now=0.0)
    assert scaling.history.starts == ()


def test_a_manual_change_is_reported_when_it_is_overwritten() -> None:
    scaling = Scaling()
    decision = scaling.decide(AUTOSCALED, FULL, scrape_round=1, now=0.0)
    assert decision is not None
    scaling.scaled(AUTOSCALED, decision, 0.0)
    by_hand = llmd(spec={**SPEC, "replicas": 2})
    again = scaling.decide(by_hand, FULL, scrape_round=2, now=2.0)
    assert again is not None
    scaling.scaled(by_hand, again, 2.0)
    assert scaling.overwritten == "spec.replicas was set to 2 by hand; the autoscaler set it to 3"
    assert [(item["from"], item["to"]) for item in scaling.decisions] == [(1, 3), (2, 3)]


def test_so_is_the_first_one_since_the_operator_started() -> None:
    scaling = Scaling()
    idle = observed(pod("a", ready=True))
    assert scaling.decide(AUTOSCALED, idle, scrape_round=1, now=0.0) is None
    by_hand = llmd(spec={**SPEC, "replicas": 4})
    decision = scaling.decide(by_hand, idle, scrape_round=2, now=2.0)
    assert decision is not None
    scaling.scaled(by_hand, decision, 2.0)
    assert scaling.overwritten == "spec.replicas was set to 4 by hand; the autoscaler set it to 1"


def test_memory_is_there_before_the_first_scrape_round_has_ended() -> None:
    """The status was written from an empty memory until then: what an operator had learnt was gone after a restart."""
    change = {"time": CREATED, "from": 1, "to": 3, "inputs": "", "reason": "Standing"}
    standing = {"replicas": 3, "seenReplicaMinutes": 60, "late": [{"replicas": 1, "permille": 200}]}
    history = {"turnoverMilliseconds": 9000, "saturationRunning": 8, "startupSecondsP90": 31, "standing": standing}
    status = {"autoscaling": {"history": history, "decisions": [change]}}
    restarted = replace(AUTOSCALED, status=status)
    scaling = Scaling()
    assert scaling.decide(restarted, observed(pod("a", ready=True)), scrape_round=0, now=2e9) is None
    assert scaling.decisions == [change]
    written = remember(scaling.history, recommended=1)
    assert written | history | {"standing": written["standing"] | standing} == written, "nothing is lost"
