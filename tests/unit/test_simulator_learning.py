"""What PageFleet learns from the slice that others are tuned on, and that nothing else reaches it."""

from dataclasses import replace

import pytest

from pagefleet_operator.model import AutoscalingSpec, Slo
from pagefleet_simulator import compare
from pagefleet_simulator.catalog import MEMORY
from pagefleet_simulator.generators import generate, steady
from pagefleet_simulator.main import main
from pagefleet_simulator.policies.ours import PageFleet
from support.operator_objects import sample
from support.simulation import ready_fleet

SPEC = AutoscalingSpec(max_replicas=8, slo=Slo(time_to_first_token_ms=3000))
STANDING = {
    "replicas": 3,
    "seenReplicaMinutes": 20,
    "longestQuietMinutes": 7,
    "late": [{"replicas": 1, "permille": 500}],
}


def run(load: compare.Load, monkeypatch: pytest.MonkeyPatch) -> dict[str, compare.Cell]:
    monkeypatch.setattr(compare, "loads", lambda _: {load.name: load})
    monkeypatch.setattr(compare, "_LOADS", {})
    policies = ("pagefleet", "pagefleet-learnt")
    _, cells = compare.compare(load_names=[load.name], start_seconds=[30.0], policies=policies, scale=0.3)
    return {cell.policy: cell for cell in cells}


def test_the_lesson_is_the_slice_that_others_are_tuned_on_and_nothing_of_what_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spike = compare.loads(0.3)["spike"]
    cells = run(spike, monkeypatch)
    assert cells["pagefleet"].settings == {}
    memory = cells["pagefleet-learnt"].settings[MEMORY]
    assert memory["standing"]["replicas"] > 1, "it has seen the spike of the tuning slice"
    calm = replace(spike, test=generate("calm", steady(0.5), 200, seed=1))
    assert run(calm, monkeypatch)["pagefleet-learnt"].settings[MEMORY] == memory
    untaught = replace(spike, tuning=generate("calm", steady(0.5), 360, seed=1), test=calm.test)
    assert run(untaught, monkeypatch)["pagefleet-learnt"].settings[MEMORY] != memory


def test_a_memory_is_read_as_a_new_operator_reads_it() -> None:
    taught, untaught = PageFleet(SPEC, memory={"standing": STANDING}), PageFleet(SPEC)
    idle = ready_fleet(1, sample())
    assert [policy.decide(idle, 0.0) for policy in (taught, untaught)] == [3, 1]
    assert taught.last is not None
    assert taught.last.reason == "Standing"
    assert taught.memory()["standing"] == STANDING, "and written as it was"


def test_before_it_has_decided_it_remembers_nothing() -> None:
    assert PageFleet(SPEC).memory() == {}


def test_a_single_run_has_no_lesson_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--load", "steady:rate=1", "--seconds", "10", "--policy", "pagefleet-learnt"]) == 2
    assert "only `compare` has one" in capsys.readouterr().err
