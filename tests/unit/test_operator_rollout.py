"""Failed rollouts go back to what worked, and are tried again only when the spec changes."""

import copy
from typing import Any

import pytest

from pagefleet_operator import builders
from pagefleet_operator.conditions import Facts, judge
from pagefleet_operator.history import History
from pagefleet_operator.plan import Observed, Plan, plan
from pagefleet_operator.pods import parse_pod
from pagefleet_operator.rollout import stamped, template_hash
from pagefleet_operator.settings import ChildSettings
from pagefleet_operator.status import render
from support.operator_objects import llmd, pod_body

SETTINGS = ChildSettings(server_image="img")
OLD = {"engine": {"image": "good:1"}}
NEW = {"engine": {"image": "bad:2"}}


def deployment(spec: dict[str, Any], *, reason: str | None = None) -> dict[str, Any]:
    wanted = builders.deployment(llmd(spec=spec), SETTINGS, replicas=2)
    body = stamped(wanted, template_hash(wanted))
    body["metadata"]["uid"] = "d"
    conditions = [{"type": "Progressing", "status": "False", "reason": reason}] if reason else []
    return {**body, "status": {"updatedReplicas": 1, "conditions": conditions}}


def replica_set(spec: dict[str, Any], name: str, revision: int, *, replicas: int, ready: int) -> dict[str, Any]:
    template = copy.deepcopy(deployment(spec)["spec"]["template"])
    template["metadata"]["labels"]["pod-template-hash"] = name
    return {
        "metadata": {
            "name": name,
            "labels": {"pod-template-hash": name},
            "annotations": {"deployment.kubernetes.io/revision": str(revision)},
        },
        "spec": {"replicas": replicas, "template": template},
        "status": {"readyReplicas": ready},
    }


def hash_of(spec: dict[str, Any]) -> str:
    return template_hash(builders.deployment(llmd(spec=spec), SETTINGS, replicas=2))


def made(
    *pods: dict[str, Any],
    old_ready: int = 2,
    old_replicas: int = 2,
    reason: str | None = None,
    status: dict[str, Any] | None = None,
    spec: dict[str, Any] | None = None,
) -> Plan:
    wanted = {"replicas": 2, **(spec or NEW)}
    sets = (
        replica_set(OLD, "old", 1, replicas=old_replicas, ready=old_ready),
        replica_set(NEW, "new", 2, replicas=1, ready=0),
    )
    observed = Observed(
        children={"Deployment": deployment(wanted, reason=reason)},
        pods=tuple(parse_pod(pod) for pod in pods),
        replica_sets=sets,
    )
    return plan(llmd(spec=wanted, status=status), observed, SETTINGS)


def image_of(done: Plan) -> str:
    (manifest,) = [item for item in done.manifests if item["kind"] == "Deployment"]
    image: str = manifest["spec"]["template"]["spec"]["containers"][0]["image"]
    return image


CRASHED = pod_body("chat-new-1", ready=False, template_hash="new", restarts=3, last_exit=(3, "no such model"))


def test_a_new_replica_that_keeps_crashing_is_rolled_back_with_its_message() -> None:
    done = made(CRASHED)
    assert image_of(done) == "good:1"
    assert done.failure is not None
    assert done.failure.template_hash == hash_of(NEW)
    assert "no such model" in done.failure.message


def test_so_is_one_that_is_never_ready_in_time() -> None:
    done = made(reason="ProgressDeadlineExceeded")
    assert image_of(done) == "good:1"


@pytest.mark.parametrize(
    "pod",
    [
        pod_body("chat-new-1", ready=False, template_hash="new", restarts=1, last_exit=(3, "x")),
        pod_body("chat-new-1", ready=True, template_hash="new", restarts=5),
        pod_body("chat-old-1", ready=False, template_hash="old", restarts=9, last_exit=(3, "x")),
    ],
    ids=["crashed once", "recovered", "an old replica crashes"],
)
def test_other_troubles_roll_nothing_back(pod: dict[str, Any]) -> None:
    done = made(pod)
    assert done.failure is None
    assert image_of(done) == "bad:2"


def test_without_anything_that_worked_there_is_nothing_to_go_back_to() -> None:
    done = made(CRASHED, old_ready=1)
    assert (done.failure, image_of(done)) == (None, "bad:2")


@pytest.mark.parametrize(("replicas", "ready"), [(0, 0), (2, 1), (1, 0)])
def test_what_worked_once_is_gone_back_to_also_when_the_rollout_took_it_away(replicas: int, ready: int) -> None:
    """Without surge the rollout of a single replica takes the good one away first; it was never rolled back."""
    status = {"rollout": {"availableTemplateHash": hash_of(OLD)}}
    done = made(CRASHED, old_replicas=replicas, old_ready=ready, status=status)
    assert done.failure is not None
    assert image_of(done) == "good:1"
    assert done.available_template == hash_of(OLD), "still remembered"


def test_a_template_is_remembered_once_all_its_replicas_are_ready() -> None:
    def after(*sets: dict[str, Any], before: str | None = None) -> str | None:
        observed = Observed(children={"Deployment": deployment(OLD)}, replica_sets=sets)
        return plan(
            llmd(spec={"replicas": 2, **OLD}, status=remembering(before)), observed, SETTINGS
        ).available_template

    def remembering(known: str | None) -> dict[str, Any]:
        return {"rollout": {"availableTemplateHash": known}} if known else {}

    assert after() is None
    assert after(replica_set(OLD, "old", 1, replicas=2, ready=1), before="former") == "former"
    assert after(replica_set(OLD, "old", 1, replicas=1, ready=1)) is None, "the rollout is under way"
    assert after(replica_set(OLD, "old", 1, replicas=2, ready=2), before="former") == hash_of(OLD)
    restarted = replica_set(OLD, "restarted", 2, replicas=2, ready=2)
    assert after(replica_set(OLD, "old", 1, replicas=0, ready=0), restarted) == hash_of(OLD), "kubectl rollout restart"


def test_what_is_remembered_outlives_a_name_conflict() -> None:
    status = {"rollout": {"availableTemplateHash": "good", "failedTemplateHash": "bad", "message": "crashed"}}
    made_of_it = llmd(status=status)
    foreign = Observed(children={"Service": {"metadata": {"ownerReferences": []}}})
    facts = Facts(made_of_it, foreign, plan(made_of_it, foreign, SETTINGS))
    assert facts.plan.conflicts
    assert render(facts, History(), [], 0.0)["rollout"] == status["rollout"]


def test_a_remembered_failure_is_not_tried_again_until_the_spec_changes() -> None:
    status = {"rollout": {"failedTemplateHash": hash_of(NEW), "message": "crashed"}}
    assert image_of(made(status=status)) == "good:1"
    assert image_of(made(status=status, old_ready=0)) == "good:1", "not even while the old replicas are down"
    assert image_of(made(status=status, spec={"engine": {"image": "fixed:3"}})) == "fixed:3"


def test_a_second_template_that_fails_is_rolled_back_too() -> None:
    status = {"rollout": {"failedTemplateHash": "0123456789", "message": "an earlier one"}}
    done = made(CRASHED, status=status)
    assert done.failure is not None
    assert done.failure.template_hash == hash_of(NEW)


def test_the_old_replica_set_is_found_again_by_its_template() -> None:
    done = made(CRASHED)
    (manifest,) = [item for item in done.manifests if item["kind"] == "Deployment"]
    template = manifest["spec"]["template"]
    assert "pod-template-hash" not in template["metadata"]["labels"]
    assert template == deployment(OLD)["spec"]["template"]
    assert manifest["spec"]["replicas"] == 2


def test_degraded_says_what_to_do() -> None:
    verdicts = {item.type: item for item in judge(Facts(llmd(spec=NEW), Observed(), made(CRASHED)))}
    assert verdicts["Degraded"].reason == "RolloutFailed"
    assert "change the spec to try again" in verdicts["Degraded"].message
