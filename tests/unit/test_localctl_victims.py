"""The order in which a shrinking ReplicaSet deletes its pods."""

import pytest

from pagefleet_localcluster.controllers.victims import choose_victims, deletion_cost
from pagefleet_localcluster.objects import Object
from support.localcluster_builders import pod


@pytest.mark.parametrize(
    ("case", "victim", "survivor"),
    [
        ("unassigned before assigned", pod("v", node=None), pod("s", phase="Pending", ready=False)),
        ("pending before running", pod("v", phase="Pending", ready=False), pod("s", ready=False)),
        ("unknown before running", pod("v", phase="Unknown"), pod("s")),
        ("not ready before ready", pod("v", ready=False, cost=100), pod("s", cost=-100)),
        ("lower deletion cost", pod("v", cost=-1, ready_since=0), pod("s", ready_since=50)),
        ("ready for a shorter time", pod("v", ready_since=50), pod("s", ready_since=10, restarts=9)),
        ("more restarts", pod("v", restarts=2, created=0), pod("s", restarts=1, created=50)),
        ("younger", pod("v", created=50), pod("s", created=10)),
    ],
)
def test_victim_is(case: str, victim: Object, survivor: Object) -> None:
    for pods in ([victim, survivor], [survivor, victim]):
        assert choose_victims(pods, 1, pods) == [victim], case


def test_of_equals_the_one_on_the_fuller_node_goes() -> None:
    """Pods of other ReplicaSets of the same Deployment count too."""
    lonely, crowded = pod("a", node="n0", ready_since=50), pod("b", node="n1")
    neighbour = pod("c", node="n1")
    assert choose_victims([lonely, crowded], 1, [lonely, crowded, neighbour]) == [crowded]


def test_as_many_as_asked() -> None:
    pods = [pod(f"p{i}", created=i) for i in range(5)]
    assert [p["metadata"]["name"] for p in choose_victims(pods, 2, pods)] == ["p4", "p3"]
    assert choose_victims(pods, 0, pods) == []


@pytest.mark.parametrize(("text", "want"), [("7", 7), ("-3", -3), ("x", 0), ("1.5", 0), (str(2**31), 0)])
def test_deletion_cost_is_a_32_bit_integer_or_nothing(text: str, want: int) -> None:
    assert deletion_cost(pod(cost=text)) == want
