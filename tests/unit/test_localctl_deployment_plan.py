"""What the deployment controller does next, as exact plans."""

from typing import Any

import pytest

from pagefleet_localcluster.controllers.deployment_plan import (
    DeploymentPlan,
    Resize,
    find_new,
    plan_deployment,
    template_hash,
)
from pagefleet_localcluster.objects import Object, format_time, name_of
from support.localcluster_builders import deployment, replica_set

NOW = 1000.0


def plan(d: Object, *sets: Object, old_pods: int = 0, now: float = NOW) -> DeploymentPlan:
    return plan_deployment(d, sets, old_pods, now)


def condition(status: Object, kind: str) -> tuple[str, str, str]:
    found = next(c for c in status["conditions"] if c["type"] == kind)
    return found["status"], found["reason"], found["message"]


def progressing(reason: str, updated: float, status: str = "True") -> list[dict[str, Any]]:
    moment = format_time(updated)
    return [
        {
            "type": "Progressing",
            "status": status,
            "reason": reason,
            "lastUpdateTime": moment,
            "lastTransitionTime": moment,
            "message": "",
        }
    ]


def sizes(p: DeploymentPlan) -> dict[str, tuple[int, int]]:
    return {r.name: (r.before, r.after) for r in p.resize if r.before != r.after}


def test_first_plan_creates_the_replica_set() -> None:
    d = deployment(replicas=2)
    got = plan(d)
    assert got.create is not None
    hash_label = template_hash(d)
    assert got.create["metadata"] == {
        "name": f"web-{hash_label}",
        "namespace": "default",
        "labels": {"app": "web", "pod-template-hash": hash_label},
        "annotations": {
            "deployment.kubernetes.io/revision": "1",
            "deployment.kubernetes.io/desired-replicas": "2",
            "deployment.kubernetes.io/max-replicas": "3",
        },
        "ownerReferences": [
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": "web",
                "uid": "uid-web",
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
    assert got.create["spec"]["replicas"] == 2
    assert got.create["spec"]["selector"]["matchLabels"] == {"app": "web", "pod-template-hash": hash_label}
    assert got.revision == "1"
    assert condition(got.status, "Progressing") == (
        "True",
        "NewReplicaSetCreated",
        f'Created new replica set "web-{hash_label}"',
    )
    assert condition(got.status, "Available")[:2] == ("False", "MinimumReplicasUnavailable")


def test_planning_changes_none_of_its_input() -> None:
    d = deployment()
    plan(d)
    assert d == deployment()


def test_a_collision_changes_the_hash() -> None:
    assert template_hash(deployment()) != template_hash(deployment(status={"collisionCount": 1}))


def test_hash_label_does_not_count_when_templates_are_compared() -> None:
    mine = replica_set("web-abc", size=1)
    mine["spec"]["template"]["metadata"]["labels"]["pod-template-hash"] = "abc"
    assert find_new(deployment(), [replica_set("other", size=1, image="img:0"), mine]) is mine


def test_update_surges_first() -> None:
    old = replica_set("old", size=3, image="img:0", revision=4)
    got = plan(deployment(), old)
    assert got.create is not None and got.create["spec"]["replicas"] == 1
    assert got.revision == "5"
    assert got.resize == []


def test_then_old_pods_go_one_for_one() -> None:
    old = replica_set("old", size=3, image="img:0", revision=1, desired=3)
    new = replica_set("new", size=1, revision=2, desired=3)
    got = plan(deployment(), old, new)
    assert got.create is None
    assert got.resize == [
        Resize(
            "old",
            3,
            2,
            {"deployment.kubernetes.io/max-replicas": "4"},
        )
    ]


def test_going_back_gives_the_old_replica_set_a_new_revision_and_keeps_its_history() -> None:
    back = replica_set("back", size=0, revision=1, desired=3)
    current = replica_set("current", size=3, image="img:2", revision=2, desired=3)
    got = plan(deployment(), back, current)
    assert got.revision == "3"
    assert got.resize == [
        Resize(
            "back",
            0,
            1,
            {
                "deployment.kubernetes.io/revision": "3",
                "deployment.kubernetes.io/revision-history": "1",
                "deployment.kubernetes.io/max-replicas": "4",
            },
        )
    ]


def test_annotations_reach_the_replica_set_but_not_bookkeeping() -> None:
    d = deployment()
    d["metadata"]["annotations"] = {
        "kubernetes.io/change-cause": "because",
        "kubectl.kubernetes.io/last-applied-configuration": "{}",
        "deployment.kubernetes.io/revision": "1",
    }
    new = replica_set("new", size=3, desired=3)
    assert plan(d, new).resize == [Resize("new", 3, 3, {"kubernetes.io/change-cause": "because"})]


def test_a_changed_count_scales_without_rolling() -> None:
    old = replica_set("old", size=3, image="img:0", desired=3, maximum=4)
    new = replica_set("new", size=1, available=0, revision=2, desired=3, maximum=4, created=9)
    got = plan(deployment(replicas=6), old, new)
    assert sizes(got) == {"old": (3, 5), "new": (1, 2)}


def test_paused_scales_but_does_not_roll() -> None:
    old = replica_set("old", size=3, image="img:0", desired=3)
    got = plan(deployment(paused=True), old)
    assert got.create is None and sizes(got) == {}
    assert condition(got.status, "Progressing")[:2] == ("Unknown", "DeploymentPaused")
    assert sizes(plan(deployment(paused=True, replicas=5), old)) == {"old": (3, 5)}


def test_resumed_says_so() -> None:
    status = {"conditions": progressing("DeploymentPaused", 0, "Unknown")}
    new = replica_set("new", size=3, available=0, desired=3)
    got = plan(deployment(status=status), new)
    assert condition(got.status, "Progressing")[1] in ("DeploymentResumed", "ReplicaSetUpdated")


def test_deleted_only_reports() -> None:
    d = deployment()
    d["metadata"]["deletionTimestamp"] = format_time(NOW)
    got = plan(d, replica_set("old", size=3, image="img:0"))
    assert (got.create, got.resize, got.delete) == (None, [], [])


def test_recreate_waits_until_old_pods_are_gone() -> None:
    d = deployment(strategy="Recreate")
    old = replica_set("old", size=3, image="img:0", desired=3)
    assert sizes(plan(d, old, old_pods=3)) == {"old": (3, 0)}
    gone = replica_set("old", size=0, image="img:0", desired=3)
    assert plan(d, gone, old_pods=1).create is None
    created = plan(d, gone, old_pods=0).create
    assert created is not None and created["spec"]["replicas"] == 3


def test_complete_says_so_and_forgets_old_revisions() -> None:
    old = [replica_set(f"old{i}", size=0, image=f"img:{9 + i}", revision=i + 1) for i in range(3)]
    new = replica_set("new", size=3, revision=4, desired=3)
    status = {
        "observedGeneration": 1,
        "replicas": 3,
        "updatedReplicas": 3,
        "conditions": progressing("ReplicaSetUpdated", 990),
    }
    got = plan(deployment(status=status, revisionHistoryLimit=1), *old, new)
    assert got.delete == ["old0", "old1"]
    assert condition(got.status, "Progressing") == (
        "True",
        "NewReplicaSetAvailable",
        'ReplicaSet "new" has successfully progressed.',
    )
    assert condition(got.status, "Available") == (
        "True",
        "MinimumReplicasAvailable",
        "Deployment has minimum availability.",
    )
    assert got.requeue_seconds is None


@pytest.mark.parametrize(
    ("case", "age", "want", "again"),
    [
        ("within the deadline it is looked at again", 50, ("True", "ReplicaSetUpdated"), 11.0),
        ("beyond it", 61, ("False", "ProgressDeadlineExceeded"), None),
    ],
)
def test_progress_deadline(case: str, age: int, want: tuple[str, str], again: float | None) -> None:
    status = {
        "observedGeneration": 1,
        "replicas": 3,
        "updatedReplicas": 3,
        "conditions": progressing("ReplicaSetUpdated", NOW - age),
    }
    new = replica_set("new", size=3, available=0, desired=3)
    got = plan(deployment(status=status, progressDeadlineSeconds=60), new)
    assert condition(got.status, "Progressing")[:2] == want, case
    assert got.requeue_seconds == again


def test_progress_renews_the_deadline_without_a_transition() -> None:
    status = {"replicas": 2, "updatedReplicas": 2, "conditions": progressing("ReplicaSetUpdated", NOW - 500)}
    new = replica_set("new", size=3, available=1, desired=3)
    found = next(c for c in plan(deployment(status=status), new).status["conditions"] if c["type"] == "Progressing")
    assert found["lastUpdateTime"] == format_time(NOW)
    assert found["lastTransitionTime"] == format_time(NOW - 500)


def test_failure_to_create_pods_shows_on_the_deployment() -> None:
    new = replica_set("new", size=3, available=0, desired=3)
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota"}
    new["status"]["conditions"] = [failure]
    got = plan(deployment(), new)
    assert condition(got.status, "ReplicaFailure") == ("True", "FailedCreate", "exceeded quota")
    new["status"]["conditions"] = []
    after = plan(deployment(status=got.status), new).status
    assert [c["type"] for c in after["conditions"]] == ["Available", "Progressing"]


def test_counts() -> None:
    old = replica_set("old", size=2, image="img:0", desired=3)
    new = replica_set("new", size=2, available=1, revision=2, desired=3)
    status = plan(deployment(generation=7), old, new).status
    counts = {key: value for key, value in status.items() if key != "conditions"}
    assert counts == {
        "observedGeneration": 7,
        "replicas": 4,
        "updatedReplicas": 2,
        "readyReplicas": 3,
        "availableReplicas": 3,
        "unavailableReplicas": 1,
        "terminatingReplicas": 0,
    }


def test_an_unchanged_world_gives_an_unchanged_status() -> None:
    new = replica_set("new", size=3, desired=3)
    first = plan(deployment(), new)
    again = plan(deployment(status=first.status), new, now=NOW + 60)
    final = plan(deployment(status=again.status), new, now=NOW + 120)
    assert final.status == again.status
    assert name_of(new) == "new" and final.resize == []
