"""What is done about what is seen: children, victims, conflicts."""

import copy
from typing import Any

import pytest

from pagefleet_operator import builders
from pagefleet_operator.drift import applied, managers_of, needs_apply, was_edited
from pagefleet_operator.plan import Observed, plan
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


CACHE = {"model": {"source": "hf://acme/tiny", "cache": {"size": "10Gi"}}}
RESTRICTED = {"networkPolicy": {"mode": "Restricted"}}


def test_children_that_a_spec_may_ask_for_come_before_the_pods() -> None:
    made = plan(llmd(spec={**CACHE, **RESTRICTED}), Observed(has_pod_monitors=True), SETTINGS)
    assert [item["kind"] for item in made.manifests][3:] == [
        "PersistentVolumeClaim",
        "NetworkPolicy",
        "PodMonitor",
        "Deployment",
    ]


def ours(kind: str) -> dict[str, Any]:
    metadata = {"name": "chat", "uid": kind, "ownerReferences": [{"uid": "uid-1", "controller": True}]}
    return {"kind": kind, "metadata": metadata}


def test_what_is_no_longer_asked_for_goes_but_never_a_claim_with_data() -> None:
    children = {kind: ours(kind) for kind in ("PersistentVolumeClaim", "NetworkPolicy", "PodMonitor")}
    made = plan(llmd(), Observed(children=children), SETTINGS)
    assert made.removals == ("NetworkPolicy", "PodMonitor")
    kept = plan(llmd(spec=RESTRICTED), Observed(children=children, has_pod_monitors=True), SETTINGS)
    assert kept.removals == ()


def test_a_template_beyond_what_is_allowed_leaves_everything_as_it_is() -> None:
    limited = ChildSettings(server_image="img", allowed_template_fields=("spec.nodeSelector", "spec.containers.env"))
    fine = {"spec": {"nodeSelector": {"a": "b"}, "containers": [{"name": "server", "env": [{"name": "A"}]}]}}
    assert plan(llmd(spec={"template": fine}), Observed(), limited).refusal is None
    bad = {"spec": {"hostNetwork": True, "containers": [{"name": "server", "securityContext": {"privileged": True}}]}}
    made = plan(llmd(spec={"template": bad}), Observed(), limited)
    assert made.manifests == ()
    assert made.refusal is not None
    assert made.refusal[0] == "InvalidTemplate"
    assert "spec.template.spec.containers.securityContext.privileged" in made.refusal[1]
    assert "spec.template.spec.hostNetwork" in made.refusal[1]
    nothing = ChildSettings(server_image="img", allowed_template_fields=())
    assert plan(llmd(), Observed(), nothing).refusal is None
    assert plan(llmd(spec={"template": {"metadata": {"labels": {"a": "b"}}}}), Observed(), nothing).refusal is not None


def test_a_claim_of_one_node_is_refused_for_more_than_one_pod() -> None:
    spec = {"model": {"source": "hf://acme/tiny", "cache": {"claimName": "mine"}}}
    alone = {"spec": {"accessModes": ["ReadWriteOnce"]}}
    made = plan(llmd(spec=spec), Observed(cache_claim=alone), SETTINGS)
    assert made.refusal is not None
    assert made.refusal[0] == "CacheNotShared"
    assert "mine" in made.refusal[1]
    assert "rollout.maxSurge" in made.refusal[1]
    single = {**spec, "rollout": {"maxSurge": 0, "maxUnavailable": 1}}
    assert plan(llmd(spec=single), Observed(cache_claim=alone), SETTINGS).refusal is None
    shared = {"spec": {"accessModes": ["ReadWriteMany"]}}
    assert plan(llmd(spec=spec), Observed(cache_claim=shared), SETTINGS).refusal is None
    assert plan(llmd(spec=spec), Observed(), SETTINGS).refusal is None, "a claim that is not there yet"


def test_foreign_objects_of_our_name_stop_everything() -> None:
    theirs = {"metadata": {"name": "chat", "ownerReferences": [{"uid": "other", "controller": True}]}}
    made = plan(llmd(), Observed(children={"Service": theirs}), SETTINGS)
    assert made.conflicts == ("Service chat",)
    assert made.manifests == ()


@pytest.mark.parametrize("missing", [None, "app.kubernetes.io/managed-by", "pagefleet.dev/llmdeployment"])
def test_a_child_without_an_owner_is_taken_over_if_its_labels_say_that_it_is_ours(missing: str | None) -> None:
    """After `kubectl delete --cascade=orphan` a new object of the name could never have its children again."""
    child = live(1)
    child["metadata"]["ownerReferences"] = [{"uid": "other", "kind": "Secret"}]
    child["metadata"]["labels"].pop(missing, None)
    made = plan(llmd(uid="new"), Observed(children={"Deployment": child}), SETTINGS)
    assert made.conflicts == (() if missing is None else ("Deployment chat",))


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


def test_a_foreign_scale_up_of_the_child_is_put_right_at_once() -> None:
    observed = Observed(children={"Deployment": live(3)}, pods=pods(pod_body("a"), pod_body("b"), pod_body("c")))
    made = plan(llmd(spec={"replicas": 1}), observed, SETTINGS, applied_replicas=1)
    assert (replicas_of(made.manifests), made.waits_for_victims) == (1, False)


class TestNeedsApply:
    manifest = builders.deployment(llmd(spec={"resources": {"limits": {"cpu": "1000m"}}}), SETTINGS, replicas=1)

    def answer(self, **spec: Any) -> dict[str, Any]:
        """As an API server would answer: with defaults, and quantities in its own spelling."""
        body = copy.deepcopy(self.manifest)
        body["metadata"] |= {"uid": "d", "generation": 1, "resourceVersion": "7"}
        body["spec"] |= {"revisionHistoryLimit": 10, **spec}
        body["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "1"
        return body

    def test_absent_or_never_applied(self) -> None:
        assert needs_apply(self.manifest, None, None)
        assert needs_apply(self.manifest, self.answer(), None)

    def test_not_when_nothing_changed(self) -> None:
        assert not needs_apply(self.manifest, self.answer(), applied(self.manifest, self.answer()))

    def test_not_when_others_change_fields_of_their_own(self) -> None:
        child = self.answer(paused=False)
        child["spec"]["template"]["metadata"]["annotations"] = {"kubectl.kubernetes.io/restartedAt": "now"}
        child["spec"]["template"]["spec"]["containers"].insert(0, {"name": "injected"})
        assert not needs_apply(self.manifest, child, applied(self.manifest, self.answer()))

    def test_not_when_it_comes_from_a_list(self) -> None:
        """Items of a list say neither apiVersion nor kind: each restart and resync then was a fight with "someone"."""
        child = self.answer()
        del child["kind"], child["apiVersion"]
        assert not needs_apply(self.manifest, child, applied(self.manifest, self.answer()))

    def test_when_the_wish_changed(self) -> None:
        other = builders.deployment(llmd(), SETTINGS, replicas=2)
        assert needs_apply(other, self.answer(), applied(self.manifest, self.answer()))

    def test_when_someone_edited_a_field_of_ours(self) -> None:
        child = self.answer(replicas=5)
        before = applied(self.manifest, self.answer())
        assert needs_apply(self.manifest, child, before)
        assert was_edited(child, before)

    def test_when_someone_edited_the_container(self) -> None:
        child = self.answer()
        child["spec"]["template"]["spec"]["containers"][0]["image"] = "other"
        assert needs_apply(self.manifest, child, applied(self.manifest, self.answer()))

    def test_when_someone_added_to_a_selector(self) -> None:
        """Selectors are replaced as a whole: one more key in them and the Service finds no pod."""
        service = builders.service(llmd())
        live = copy.deepcopy(service) | {"metadata": service["metadata"] | {"uid": "s"}}
        edited = copy.deepcopy(live)
        edited["spec"]["selector"]["other"] = "label"
        assert was_edited(edited, applied(service, live))
        assert not was_edited(copy.deepcopy(live), applied(service, live))

    def test_when_a_label_of_ours_is_gone(self) -> None:
        child = self.answer()
        child["metadata"]["labels"] = {}
        assert needs_apply(self.manifest, child, applied(self.manifest, self.answer()))

    def test_when_the_child_was_deleted_and_made_anew(self) -> None:
        child = self.answer()
        child["metadata"]["uid"] = "another"
        before = applied(self.manifest, self.answer())
        assert needs_apply(self.manifest, child, before)
        assert not was_edited(child, before)


def test_rivals_are_those_who_hold_the_spec_latest_first() -> None:
    def entry(manager: str, time: str, part: str = "f:spec", **more: str) -> dict[str, Any]:
        return {"manager": manager, "time": time, "fieldsV1": {part: {}}, **more}

    child = {
        "metadata": {
            "managedFields": [
                entry("pagefleet-operator", "4"),
                entry("kube-controller-manager", "9", "f:metadata"),
                entry("kube-controller-manager", "9", subresource="status"),
                entry("argocd", "1"),
                entry("kubectl", "3"),
            ]
        }
    }
    assert managers_of(child) == ["kubectl", "argocd"]
