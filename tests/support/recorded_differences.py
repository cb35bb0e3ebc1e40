"""Where the embedded API's answers differ from the recordings, and why; and the CRDs that the recording only names."""

import copy
from collections.abc import Callable
from typing import Any

from support.localapi import draft_crd

Json = dict[str, Any]

_TRIMMED = "the recording holds only part of this answer"
_ALONE = "no controller runs in this replay, so that its answers do not hang on the controllers' speed"
_MOMENT = "what the controllers have written by then hangs on their speed, not on the API"
_OURS = "the local controllers' own way, with the same meaning for clients"

DIFFERENCES: dict[tuple[str, str], str] = {
    ("crd/create CRD", "body.status.*"): "names are accepted at once, not a moment later by a controller",
    ("crd/CRD conditions", "body.metadata.managedFields[[]]"): "no controller of its own writes the CRD's status",
    (
        "crd/wrong apiVersion in body",
        "Warning",
    ): "the 400 itself says what is wrong; we do not also warn of unknown fields",
    ("crd_refused/*", "body.apiVersion"): _TRIMMED,
    ("crd_refused/*", "body.metadata"): _TRIMMED,
    ("crd_refused/*", "body.details"): _TRIMMED,
    ("crd_refused/*", "body.spec"): _TRIMMED,
    ("crd_refused/*", "body.status.*"): "names are accepted at once, not a moment later by a controller",
    ("apply/*", "body*managedFields[[]]"): _ALONE,
    ("apply/*", "body.metadata.annotations"): _ALONE,
    ("apply/*", "body.status.conditions"): _ALONE,
    ("apply/deployment table", "body.rows[[]0].cells[[]2]"): _ALONE,
    ("apply/deployment table", "body.rows[[]0].object.metadata.annotations"): _ALONE,
    ("list_watch/list at a future version", "body.message"): "the current version counts other writes",
    ("workload/new template", "body.status.*"): _MOMENT,
    ("workload/new template", "body.metadata.managedFields*"): "writes of one second are in another order",
    ("workload/ReplicaFailure condition", "*ReplicaFailure*"): "see the condition itself",
    ("workload/unschedulable events", "body.items[[]]"): "a repeated event is counted in one object here",
    ("workload/unschedulable events", "body.items*managedFields*"): "the event is written as core/v1",
    ("workload/unschedulable events", "body.items*involvedObject.*"): "which pod comes first is a draw",
    ("workload/unschedulable events", "body.items*series"): "a repeated event is counted in one object here",
    ("workload/unschedulable events", "body.items*metadata.name"): "which pod comes first is a draw",
    (
        "workload/ReplicaFailure condition",
        "body.status.*",
    ): "the recorded cluster ran no quota controller, so nothing was refused; here the quota holds",
    ("workload/pdb status", "body.metadata.managedFields*"): _OURS,
    ("workload/pods*", "*lastProbeTime"): "null times are left out",
    ("workload/pods for eviction", "body.items[[]1].metadata.*"): "which of two equal pods went first is a draw",
    ("workload/service table", "body.rows[[]0].cells[[]2]"): "services have loopback addresses here",
    ("lease_events_rbac/self subject access review", "body.metadata.managedFields"): "reviews are answered, not stored",
    ("discovery//version", "body.*"): "says honestly that this server is written in Python",
    ("discovery//api", "body.serverAddressByClientCIDRs[[]0].serverAddress"): "every server has its own address",
    ("discovery//openapi/v3", "body.paths.*serverRelativeURL"): "the hash of another document",
    ("discovery/openapi v3 of our group", "*.description"): "descriptions of built-in fields are not shipped",
    ("discovery/openapi v3 of our group", "*metadata.allOf*"): "shorter names for built-in types",
    ("discovery/openapi v3 of our group", "body.components.schemas.io.k8s.*"): "shorter names for built-in types",
    ("discovery/openapi v3 of our group", "body.components.schemas.*List"): "kubectl asks for no schema of a list",
    ("discovery/openapi v3 of our group", "body.info.*"): "one title for all documents",
    ("discovery/openapi v3 of our group", "body.paths./apis*"): "only what kubectl reads: the PATCH of one object",
}


CASE_DIFFERENCES: dict[str, str] = {
    "test_a_budget_counts_one_way_only": "the message shows the object in Go's form",
    "test_a_crd_is_served_at_once_and_its_objects_go_with_it": "two kinds of 404, by the moment",
    "test_labels_are_checked": "the faults of a map come in any order",
    "test_the_spec_of_a_pod_is_fixed_but_for_its_image": "the message goes on with a diff of Go structures",
}
"""Cases of the contract suite whose answers differ from cases.json in more than numbers, and why."""


def _variant(plural: str, change: Callable[[Json, Json], None]) -> Callable[[], Json]:
    """The draft CRD under another name, changed: `change(spec properties, root schema)`."""

    def make() -> Json:
        crd = copy.deepcopy(draft_crd())
        names = crd["spec"]["names"]
        crd["metadata"]["name"] = f"{plural}.pagefleet.dev"
        kind = plural.capitalize()
        names |= {"plural": plural, "singular": plural[:-1], "kind": kind, "listKind": f"{kind}List"}
        del names["shortNames"], names["categories"]
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        change(schema["properties"]["spec"]["properties"], schema)
        return crd

    return make


def _rules(*rules: tuple[str, str], expression: str = "") -> Json:
    more = {"messageExpression": expression} if expression else {}
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} | more for rule, message in rules]}


def _unbounded(spec: Json, _root: Json) -> None:
    args = spec["engine"]["properties"]["args"]
    del args["maxItems"], args["items"]["maxLength"]
    args.update(_rules(("self.all(a, a.startsWith('--'))", "m")))


def _exclusive(_spec: Json, root: Json) -> None:
    rule = "!has(self.spec.autoscaling) || !has(self.spec.replicas)"
    root.update(_rules((rule, "either replicas or autoscaling")))


def _scale_elsewhere() -> Json:
    crd = _variant("ees", lambda spec, root: None)()
    crd["spec"]["versions"][0]["subresources"]["scale"]["specReplicasPath"] = ".spec.nowhere"
    return crd


REFUSED_CRDS: dict[str, Callable[[], Json]] = {
    "an object default ({}) is checked against its rules before nested defaults fill it": _variant(
        "aas", lambda spec, root: spec["engine"].update(_rules(("self.blockSize > 0", "immutable")))
    ),
    "a rule over an unbounded list of unbounded strings": _variant("bbs", _unbounded),
    "a rule that names an undeclared field": _variant(
        "ccs", lambda spec, root: spec["model"].update(_rules(("self.nothing == 1", "m")))
    ),
    "a rule that looks inside preserve-unknown-fields": _variant(
        "dds", lambda spec, root: spec["template"].update(_rules(("has(self.spec)", "m")))
    ),
    "scale path that is not in the schema": _scale_elsewhere,
    "a default outside its own bounds": _variant("ffs", lambda spec, root: spec["replicas"].update({"default": -1})),
    "a root rule on metadata other than name and generateName": _variant(
        "ggs", lambda spec, root: root.update(_rules(("size(self.metadata.labels) < 3", "m")))
    ),
    "an object default that misses a required field": _variant(
        "hhs", lambda spec, root: spec["autoscaling"].update({"default": {}})
    ),
    "a messageExpression and the cost limit": _variant(
        "iis",
        lambda spec, root: spec["autoscaling"].update(
            _rules(("self.minReplicas <= self.maxReplicas", "m"), expression="'at least ' + string(self.minReplicas)")
        ),
    ),
    "a rule against a field that has a default (accepted here, refuses every object that sets the other field)": (
        _variant("jjs", _exclusive)
    ),
}
