"""Sizes of ReplicaSets during rolling updates and scaling, as exact tables of Kubernetes' rules."""

import pytest

from pagefleet_localcluster.controllers.replica_arithmetic import fence_posts, new_size, scaled_sizes, shrink_old
from pagefleet_localcluster.objects import Object
from support.localcluster_builders import deployment, replica_set


@pytest.mark.parametrize(
    ("case", "replicas", "surge", "unavailable", "want"),
    [
        ("percentages round surge up and unavailable down", 10, "25%", "25%", (3, 2)),
        ("of one replica, a quarter is one more and none less", 1, "25%", "25%", (1, 0)),
        ("both zero would never move: one may be unavailable", 3, 0, 0, (0, 1)),
        ("both round to zero", 1, 0, "50%", (0, 1)),
        ("no more can be unavailable than there are", 2, 0, 5, (0, 2)),
        ("of zero replicas", 0, "25%", "25%", (0, 0)),
    ],
)
def test_fence_posts(case: str, replicas: int, surge: int | str, unavailable: int | str, want: tuple[int, int]) -> None:
    assert fence_posts(deployment(replicas=replicas, max_surge=surge, max_unavailable=unavailable)) == want, case


@pytest.mark.parametrize(
    ("case", "wanted", "surge", "new", "old", "want"),
    [
        ("first rollout takes everything", 3, 1, 0, 0, 3),
        ("an update adds only the surge", 3, 1, 0, 3, 1),
        ("no room while surge is used up", 3, 1, 1, 3, 1),
        ("goes on as old ones go", 3, 1, 1, 2, 2),
        ("never past the wanted count", 3, 3, 2, 0, 3),
        ("too many: down at once", 2, 1, 5, 0, 2),
    ],
)
def test_new_replica_set_grows_within_surge(case: str, wanted: int, surge: int, new: int, old: int, want: int) -> None:
    current = replica_set("new", size=new)
    every = [current, replica_set("old", size=old)]
    assert new_size(deployment(replicas=wanted, max_surge=surge), current, every) == want, case


def test_recreate_grows_at_once() -> None:
    assert new_size(deployment(replicas=3, strategy="Recreate"), None, []) == 3


@pytest.mark.parametrize(
    ("case", "unavailable", "new", "old", "want"),
    [
        ("nothing goes before the new one is available", 0, (1, 0), [(3, 3)], {}),
        ("one for one", 0, (1, 1), [(3, 3)], {"old0": 2}),
        ("unavailable budget is used before the new is there", 1, (1, 0), [(3, 3)], {"old0": 2}),
        ("even broken old ones wait for a new one that is not available", 0, (1, 0), [(3, 0)], {}),
        ("broken old ones go before older healthy ones", 0, (1, 1), [(1, 1), (2, 1)], {"old1": 1}),
        ("oldest first", 0, (2, 2), [(1, 1), (2, 2)], {"old0": 0, "old1": 1}),
        ("nothing left", 0, (3, 3), [(0, 0)], {}),
    ],
)
def test_old_replica_sets_shrink_within_unavailable(
    case: str, unavailable: int, new: tuple[int, int], old: list[tuple[int, int]], want: dict[str, int]
) -> None:
    current = replica_set("new", size=new[0], available=new[1], created=99)
    others = [replica_set(f"old{i}", size=s, available=a, created=i) for i, (s, a) in enumerate(old)]
    assert shrink_old(deployment(replicas=3, max_surge=1, max_unavailable=unavailable), current, others) == want, case


@pytest.mark.parametrize(
    ("case", "wanted", "new", "old", "want"),
    [
        ("a single active set takes it all", 5, 3, [0], {"new": 5}),
        ("to zero", 0, 3, [0], {"new": 0}),
        ("two active sets share in proportion, leftovers to the larger", 10, 2, [4], {"old0": 7, "new": 4}),
        ("shrinking takes in proportion", 2, 3, [3], {"old0": 1, "new": 2}),
    ],
)
def test_scaling_is_proportional(case: str, wanted: int, new: int, old: list[int], want: dict[str, int]) -> None:
    current = replica_set("new", size=new, available=0, created=99, desired=5, maximum=6)
    others = [replica_set(f"old{i}", size=size, created=i, desired=5, maximum=6) for i, size in enumerate(old)]
    assert scaled_sizes(deployment(replicas=wanted, max_surge=1), current, others) == want, case


def test_saturated_new_set_ends_the_old_ones() -> None:
    new, old = replica_set("new", size=3), replica_set("old", size=2)
    assert scaled_sizes(deployment(replicas=3), new, [old]) == {"old": 0}


def test_without_any_active_set_the_new_one_scales() -> None:
    old: list[Object] = [replica_set("old", size=0)]
    assert scaled_sizes(deployment(replicas=2), replica_set("new", size=0), old) == {"new": 2}
    assert scaled_sizes(deployment(replicas=2), None, old) == {"old": 2}
    assert scaled_sizes(deployment(replicas=2), None, []) == {}
