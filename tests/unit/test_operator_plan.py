"""What is done about what is seen: children, victims, conflicts."""

from typing import Any

from pagefleet_operator import builders
from pagefleet_operator.plan import Applied, Observed, digest, needs_apply, plan
from pagefleet_operator.pods import Pod, parse_pod
from pagefleet_operator.settings import ChildSettings
from pagefleet_operator.victims import VICTIM_COST, choose
from support.operator_objects import llmd, pod_body, sample

SETTINGS = ChildSettings(server_image="img")


def live(replicas: int, *, uid: str = "uid-1", generation: int = 1) -> dict[str, Any]:
    manifest = builders.deployment(llmd(uid=uid), SETTINGS, replicas=replicas)
    manifest["metadata"] |= {"uid": "d", "generation": generation, "resourceVersion": "7"}
    return manifest


def pods(*bodies: dict[str, Any]) -> tuple[Pod, ...]:
    return tuple(parse_pod(body) for body in bodies)


def replicas_of(manifests: tuple[dict[str, Any], ...]) -> int:
    (deployment,) = [item for item in manifests if item["kind"] == "Deployment"]
    found: int = deployment["spec"]["replicas"]
    return found


def test_a_new_object_gets_its_children() -> None:
    made = plan(llmd(spec={"replicas": 3}), Observed(), SETTINGS)
    assert [item["kind"] for item in made.manifests] == [
        "ServiceAccount",
        "Service",
        "PodDisruptionBudget",
        "Deployment",
    ]
    assert replicas_of(made.manifests) == 3


def test_foreign_objects_of_our_name_stop_everything() -> None:
    theirs = {"metadata": {"name": "chat", "ownerReferences": [{"uid": "other", "controller": True}]}}
    made = plan(llmd(), Observed(children={"Service": theirs}), SETTINGS)
    assert made.conflicts == ("Service chat",)
    assert made.manifests == ()


def test_a_child_of_an_earlier_incarnation_is_foreign() -> None:
    made = plan(llmd(uid="new"), Observed(children={"Deployment": live(1, uid="old")}), SETTINGS)
    assert made.conflicts == ("Deployment chat",)


def test_shrinking_first_marks_the_victims_and_waits_until_they_are_seen() -> None:
    three = [pod_body("a"), pod_body("b"), pod_body("c")]
    load = {"a": sample(running=5), "b": sample(running=1), "c": sample(running=9)}
    observed = Observed(children={"Deployment": live(3)}, pods=pods(*three), samples=load)
    first = plan(llmd(spec={"replicas": 2}), observed, SETTINGS)
    assert first.costs == {"b": VICTIM_COST}
    assert first.waits_for_victims
    assert replicas_of(first.manifests) == 3

    three[1] = pod_body("b", cost=str(VICTIM_COST))
    seen = plan(llmd(spec={"replicas": 2}), Observed({"Deployment": live(3)}, pods(*three), load), SETTINGS)
    assert (seen.costs, seen.waits_for_victims) == ({}, False)
    assert replicas_of(seen.manifests) == 2


def test_shrinking_does_not_wait_for_ever() -> None:
    observed = Observed(children={"Deployment": live(2)}, pods=pods(pod_body("a"), pod_body("b")))
    late = plan(llmd(spec={"replicas": 1}), observed, SETTINGS, victims_overdue=True)
    assert replicas_of(late.manifests) == 1


def test_a_shrink_taken_back_clears_the_marks() -> None:
    marked = pods(pod_body("a"), pod_body("b", cost=str(VICTIM_COST)))
    made = plan(llmd(spec={"replicas": 2}), Observed({"Deployment": live(2)}, marked), SETTINGS)
    assert made.costs == {"b": None}


def test_marks_stay_while_the_victims_are_still_leaving() -> None:
    marked = pods(pod_body("a"), pod_body("b", cost=str(VICTIM_COST)))
    made = plan(llmd(spec={"replicas": 1}), Observed({"Deployment": live(1)}, marked), SETTINGS)
    assert made.costs == {}


def test_victims_in_order_of_worth() -> None:
    bodies = [
        pod_body("busy"),
        pod_body("calm"),
        pod_body("calm-cached"),
        pod_body("silent"),
        pod_body("starting", ready=False),
        pod_body("crashed", ready=False, waiting=("CrashLoopBackOff", "")),
        pod_body("leaving", deleting=True),
    ]
    load = {"busy": sample(running=4), "calm": sample(running=1), "calm-cached": sample(running=1, cached=40)}
    order: list[str] = []
    for wanted in range(5, -1, -1):
        chosen = set(choose(pods(*bodies), load, wanted=wanted).victims)
        order += sorted(chosen - set(order))
    assert order == ["crashed", "starting", "silent", "calm", "calm-cached", "busy"]


def test_a_choice_stands_although_the_load_moves() -> None:
    bodies = [pod_body("a", cost=str(VICTIM_COST)), pod_body("b")]
    chosen = choose(pods(*bodies), {"a": sample(running=9), "b": sample(running=0)}, wanted=1)
    assert chosen.victims == ("a",)
    assert chosen.costs == {}


class TestNeedsApply:
    manifest = builders.deployment(llmd(), SETTINGS, replicas=1)

    def applied(self, version: str = "g1") -> Applied:
        return Applied(digest(self.manifest), "d", version)

    def test_absent_or_never_applied(self) -> None:
        assert needs_apply(self.manifest, None, None)
        assert needs_apply(self.manifest, live(1), None)

    def test_not_when_nothing_changed(self) -> None:
        assert not needs_apply(self.manifest, live(1), self.applied())

    def test_when_the_wish_changed(self) -> None:
        assert needs_apply(builders.deployment(llmd(), SETTINGS, replicas=2), live(1), self.applied())

    def test_when_someone_edited_the_child(self) -> None:
        assert needs_apply(self.manifest, live(1, generation=2), self.applied())

    def test_not_when_the_watch_is_behind_our_own_write(self) -> None:
        assert not needs_apply(self.manifest, live(1, generation=1), self.applied("g3"))

    def test_when_a_label_of_ours_is_gone(self) -> None:
        child = live(1)
        child["metadata"]["labels"] = {}
        assert needs_apply(self.manifest, child, self.applied())

    def test_when_the_child_was_deleted_and_made_anew(self) -> None:
        child = live(1)
        child["metadata"]["uid"] = "another"
        assert needs_apply(self.manifest, child, self.applied())
