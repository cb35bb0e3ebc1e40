"""How many pods a PodDisruptionBudget lets go."""

from pathlib import Path
from random import Random

import pytest

from pagefleet_localcluster.client import Client
from pagefleet_localcluster.controllers.disruption import budget_status
from pagefleet_localcluster.controllers.manager import ControllerManager
from pagefleet_localcluster.controllers.quota import used_of
from pagefleet_localcluster.kubeconfig import Kubeconfig
from pagefleet_localcluster.objects import Object, format_time
from support.localcluster_builders import pod


def budget(**spec: int | str) -> Object:
    return {"metadata": {"name": "b", "generation": 1}, "spec": spec}


@pytest.mark.parametrize(
    ("case", "spec", "healthy", "expected", "allowed", "desired"),
    [
        ("one may go", {"maxUnavailable": 1}, 3, 3, 1, 2),
        ("none while one is missing", {"maxUnavailable": 1}, 2, 3, 0, 2),
        ("none at all", {"maxUnavailable": 0}, 3, 3, 0, 3),
        ("a percentage rounds up", {"maxUnavailable": "30%"}, 4, 4, 2, 2),
        ("a floor", {"minAvailable": 2}, 3, 3, 1, 2),
        ("a floor in percent", {"minAvailable": "50%"}, 3, 3, 1, 2),
        ("no pods, no disruptions", {"maxUnavailable": 1}, 0, 0, 0, 0),
    ],
)
def test_allowed(
    case: str, spec: dict[str, int | str], healthy: int, expected: int, allowed: int, desired: int
) -> None:
    pods = [pod(f"p{i}") for i in range(healthy)]
    status = budget_status(budget(**spec), pods, expected, 0.0)
    assert (status["disruptionsAllowed"], status["desiredHealthy"]) == (allowed, desired), case
    [condition] = status["conditions"]
    assert condition["reason"] == ("SufficientPods" if allowed else "InsufficientPods")


def test_a_pod_that_is_being_evicted_counts_as_gone_for_two_minutes() -> None:
    pods = [pod("a"), pod("b")]
    b = budget(maxUnavailable=1)
    b["status"] = {"disruptedPods": {"a": format_time(0), "gone": format_time(0)}}
    during = budget_status(b, pods, 2, 60.0)
    assert (during["disruptionsAllowed"], during["disruptedPods"]) == (0, {"a": format_time(0)})
    after = budget_status(b, pods, 2, 121.0)
    assert after["disruptionsAllowed"] == 1 and "disruptedPods" not in after


def test_a_quota_counts_pods_that_have_not_finished() -> None:
    pods = [
        pod("a", requests={"cpu": "250m"}, limits={"nvidia.com/gpu": "1"}),
        pod("b", requests={"cpu": "1500m"}),
        pod("c", phase="Succeeded", requests={"cpu": "9"}),
    ]
    hard = ["pods", "requests.cpu", "cpu", "limits.nvidia.com/gpu", "requests.memory", "services"]
    want = {"pods": "2", "requests.cpu": "1750m", "cpu": "1750m", "limits.nvidia.com/gpu": "1", "requests.memory": "0"}
    assert used_of(hard, pods) == want


async def test_a_change_wakes_only_the_budgets_that_count_its_pods(tmp_path: Path) -> None:
    """Each change of any workload woke every budget: a thousand workloads took minutes to come up."""
    manager = ControllerManager(Client(Kubeconfig("http://127.0.0.1:1")), claims_directory=tmp_path, rng=Random(1))
    for number in range(50):
        metadata = {"namespace": "default", "name": f"b{number}"}
        selector = {"matchLabels": {"app": f"a{number}"}}
        manager.budgets.objects[f"default/b{number}"] = {"metadata": metadata, "spec": {"selector": selector}}
    metadata = {"namespace": "default", "name": "x"}
    pods = {"metadata": {"labels": {"app": "a7", "other": "o"}}, "spec": {}}
    for changed in (
        {"metadata": metadata, "spec": {"template": pods}},
        {**pods, "metadata": metadata | pods["metadata"]},
    ):
        manager._wake_budgets(None, changed)
        assert set(manager._budget_queue._due) == {"default/b7"}
        manager._budget_queue._due.clear()
        manager._wake_budgets(changed, None)
        assert set(manager._budget_queue._due) == {"default/b7"}
        manager._budget_queue._due.clear()
