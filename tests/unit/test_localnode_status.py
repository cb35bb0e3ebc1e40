"""How a pod and its containers read in `status`."""

import pytest

from pagefleet_localcluster.node.container_state import ContainerState, restored
from pagefleet_localcluster.node.pod_status import PodView, pod_status
from pagefleet_localcluster.objects import Object, format_time

T0, T1 = 1000.0, 2000.0


def running(name: str, *, ready: bool = True) -> ContainerState:
    state = ContainerState(name, "img")
    state.run("process://1", T0, restarted=False)
    state.started, state.ready = True, ready
    return state


def ended(name: str, code: int) -> ContainerState:
    state = running(name)
    state.end(code, "Completed" if code == 0 else "Error", "", T1)
    return state


def view(
    phase: str = "Running",
    *containers: ContainerState,
    init: tuple[ContainerState, ...] = (),
    sidecars: frozenset[str] = frozenset(),
    address: str = "127.64.0.1",
) -> PodView:
    return PodView(phase, address, "127.0.0.1", init, sidecars, containers or (running("c"),))


def pod(status: Object | None = None, **spec: object) -> Object:
    return {
        "metadata": {"name": "p", "namespace": "default", "uid": "u", "generation": 3},
        "spec": spec,
        "status": status or {},
    }


def conditions(status: Object) -> dict[str, tuple[str, str, str]]:
    return {c["type"]: (c["status"], c.get("reason", ""), c.get("message", "")) for c in status["conditions"]}


@pytest.mark.parametrize(
    ("case", "given", "want"),
    [
        (
            "all ready",
            view(),
            {
                "PodReadyToStartContainers": ("True", "", ""),
                "Initialized": ("True", "", ""),
                "ContainersReady": ("True", "", ""),
                "Ready": ("True", "", ""),
            },
        ),
        (
            "one of two not ready",
            view("Running", running("a"), running("b", ready=False)),
            {"Ready": ("False", "ContainersNotReady", "containers with unready status: [b]")},
        ),
        (
            "an init container still runs",
            view("Pending", ContainerState("c", "img"), init=(running("i"),)),
            {
                "Initialized": ("False", "ContainersNotInitialized", "containers with incomplete status: [i]"),
                "ContainersReady": ("False", "ContainersNotReady", "containers with unready status: [c]"),
            },
        ),
        (
            "a sidecar that is not ready counts",
            view("Running", running("c"), init=(running("s", ready=False),), sidecars=frozenset({"s"})),
            {
                "Initialized": ("True", "", ""),
                "Ready": ("False", "ContainersNotReady", "containers with unready status: [s]"),
            },
        ),
        (
            "succeeded",
            view("Succeeded", ended("c", 0)),
            {
                "PodReadyToStartContainers": ("False", "", ""),
                "Initialized": ("True", "PodCompleted", ""),
                "Ready": ("False", "PodCompleted", ""),
            },
        ),
        ("failed", view("Failed", ended("c", 1)), {"Ready": ("False", "PodFailed", "")}),
        ("not set up yet", view("Pending", address=""), {"PodReadyToStartContainers": ("False", "", "")}),
    ],
)
def test_conditions(case: str, given: PodView, want: dict[str, tuple[str, str, str]]) -> None:
    got = conditions(pod_status(pod(), given, T0))
    assert {kind: got[kind] for kind in want} == want, case


@pytest.mark.parametrize(
    ("gate", "want"),
    [
        ([], ("False", "ReadinessGatesNotReady", 'corresponding condition of pod readiness gate "g" does not exist.')),
        (
            [{"type": "g", "status": "False"}],
            ("False", "ReadinessGatesNotReady", 'the status of pod readiness gate "g" is not "True", but False'),
        ),
        ([{"type": "g", "status": "True"}], ("True", "", "")),
    ],
)
def test_readiness_gates(gate: list[Object], want: tuple[str, str, str]) -> None:
    given = pod({"conditions": gate}, readinessGates=[{"conditionType": "g"}])
    assert conditions(pod_status(given, view(), T0))["Ready"] == want


def test_what_others_wrote_is_kept_and_transitions_are_dated() -> None:
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": format_time(5)}
    first = pod_status(pod({"conditions": [scheduled], "qosClass": "Burstable"}), view(), T0)
    assert scheduled in first["conditions"] and first["qosClass"] == "Burstable"
    assert first["startTime"] == format_time(T0)
    again = pod_status(pod(first), view(), T1)
    assert again == first, "nothing has changed, so nothing is written"
    broken = pod_status(pod(first), view("Running", running("c", ready=False)), T1)
    dates = {c["type"]: c["lastTransitionTime"] for c in broken["conditions"]}
    assert (dates["Ready"], dates["Initialized"]) == (format_time(T1), format_time(T0))


def test_a_container_runs_ends_waits_and_runs_again() -> None:
    state = ContainerState("c", "img:1")
    state.wait("ContainerCreating")
    assert state.status()["state"] == {"waiting": {"reason": "ContainerCreating"}}
    state.run("process://1", T0, restarted=False)
    state.ready = state.started = True
    state.end(3, "Error", "bye", T1)
    terminated = {
        "exitCode": 3,
        "reason": "Error",
        "message": "bye",
        "startedAt": format_time(T0),
        "finishedAt": format_time(T1),
        "containerID": "process://1",
    }
    assert state.status()["state"] == {"terminated": terminated}
    assert (state.ready, state.started, state.exit_code) == (False, False, 3)
    state.wait("CrashLoopBackOff", "back-off")
    assert state.status()["lastState"] == {"terminated": terminated} and state.exit_code is None
    state.run("process://2", T1, restarted=True)
    status = state.status()
    assert (status["restartCount"], status["containerID"]) == (1, "process://2")
    assert status["lastState"] == {"terminated": terminated}


def test_after_a_restart_of_the_node_what_ran_counts_as_ended() -> None:
    before = running("c").status()
    state = restored("c", "img", [before])
    assert state.exit_code == 137 and state.restart_count == 0
    state.run("process://2", T1, restarted=True)
    assert state.restart_count == 1
    assert state.last_state["terminated"]["reason"] == "ContainerStatusUnknown"
    assert restored("other", "img", [before]) == ContainerState("other", "img")
