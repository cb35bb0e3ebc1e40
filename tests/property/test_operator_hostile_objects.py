"""Whatever stands in a spec, a status or a pod: the operator refuses it with the field, or plans; it never breaks."""

from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagefleet_operator.conditions import Facts
from pagefleet_operator.errors import SpecError
from pagefleet_operator.history import History
from pagefleet_operator.memory import restore_history
from pagefleet_operator.parsing import parse
from pagefleet_operator.plan import Observed, plan
from pagefleet_operator.pods import parse_pod
from pagefleet_operator.settings import ChildSettings
from pagefleet_operator.status import difference, render, render_invalid
from support.operator_objects import llmd, llmd_body, pod_body

SETTINGS = ChildSettings(server_image="img")
LIMITED = ChildSettings(server_image="img", allowed_template_fields=("spec.nodeSelector",))
NOW = 1_800_000_000.0
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
TEMPLATE_WORDS = st.sampled_from(
    [
        *(
            "metadata",
            "spec",
            "labels",
            "annotations",
            "containers",
            "initContainers",
            "name",
            "server",
            "env",
            "value",
        ),
        *(
            "volumeMounts",
            "mountPath",
            "volumes",
            "ports",
            "containerPort",
            "tolerations",
            "imagePullSecrets",
            "$patch",
        ),
        *("resources", "securityContext", "nodeSelector", "hostAliases", "terminationGracePeriodSeconds", "image"),
    ]
)
SPEC_WORDS = st.sampled_from(
    [
        *("model", "source", "cache", "size", "claimName", "accessModes", "tokenSecretRef", "engine", "env", "args"),
        *("valueFrom", "secretKeyRef", "key", "name", "autoscaling", "maxReplicas", "behavior", "scaleUp", "policies"),
        *("template", "placement", "resources", "limits", "rollout", "maxSurge", "networkPolicy", "namespaces", "slo"),
        *("auth", "apiKeysSecretRef", "monitoring", "podMonitor", "replicas", "accelerator", "resourceName"),
    ]
)


def documents(words: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        SCALARS | words,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | st.text(max_size=4), inner, max_size=4),
        max_leaves=24,
    )


def containers(words: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Templates that are nearly right: the odd thing sits deep inside."""
    odd = documents(words)
    container = st.fixed_dictionaries(
        {"name": st.sampled_from(["server", "app", "other"])},
        optional={"env": odd, "volumeMounts": odd, "ports": odd, "resources": odd, "image": odd},
    )
    spec = st.fixed_dictionaries(
        {"containers": st.lists(container, max_size=2)},
        optional={"volumes": odd, "tolerations": odd, "initContainers": odd, "nodeSelector": odd, "hostAliases": odd},
    )
    return st.fixed_dictionaries({}, optional={"spec": spec | odd, "metadata": odd})


@settings(max_examples=150, deadline=None)
@given(documents(TEMPLATE_WORDS) | containers(TEMPLATE_WORDS), st.sampled_from(["Pod", "Sidecar"]))
def test_every_template_is_refused_or_planned(template: Any, placement: str) -> None:
    body = llmd_body(spec={"template": template, "placement": placement})
    try:
        made = parse(body)
    except SpecError as error:
        assert all(problem.startswith("spec.") for problem in error.problems)
        render_invalid(body, error, NOW)
        return
    assert plan(made, Observed(), SETTINGS).manifests
    plan(made, Observed(), LIMITED)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(SPEC_WORDS, documents(SPEC_WORDS), max_size=5) | documents(SPEC_WORDS))
def test_every_spec_is_refused_with_the_field_or_planned(spec: Any) -> None:
    body = llmd_body()
    body["spec"] = {**body["spec"], **spec} if isinstance(spec, dict) else spec
    try:
        made = parse(body)
    except SpecError as error:
        assert error.problems
        render_invalid(body, error, NOW)
        return
    assert plan(made, Observed(), SETTINGS).manifests


WORDS = st.text(max_size=8) | st.sampled_from(["2026-01-01T00:00:00Z", "True", "Ready", "a", "9999999999-01-01"])
NUMBERS = st.integers(-(2**31), 2**31 - 1)


def of_schema(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Anything that the CRD's types let into a status."""
    kind = schema["type"]
    if kind == "integer":
        return NUMBERS
    if kind == "string":
        return st.sampled_from(schema["enum"]) if "enum" in schema else WORDS
    if kind == "array":
        return st.lists(of_schema(schema["items"]), max_size=3)
    members = {name: of_schema(member) for name, member in schema["properties"].items()}
    required = {name: members.pop(name) for name in schema.get("required", [])}
    return st.fixed_dictionaries(required, optional=members)


CRD = yaml.safe_load((Path(__file__).resolve().parents[2] / "crds" / "llmdeployment.yaml").read_text())
STATUS = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(of_schema(STATUS))
def test_a_status_that_others_wrote_is_survived(status: dict[str, Any]) -> None:
    made = llmd(status=status)
    history, decisions = restore_history(made.status, replicas=1, now=NOW)
    observed = Observed(pods=(parse_pod(pod_body("a")),))
    facts = Facts(llmd=made, observed=observed, plan=plan(made, observed, SETTINGS))
    difference(render(facts, history, decisions, NOW), status)


VALUES = st.recursive(
    st.booleans() | st.integers(0, 3) | st.text(max_size=2) | st.lists(st.integers(0, 2), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=12,
)


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386, as an API server merges a status."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


@given(st.dictionaries(st.sampled_from("abcd"), VALUES), st.dictionaries(st.sampled_from("abcd"), VALUES))
def test_a_written_status_is_the_rendered_one(last: dict[str, Any], new: dict[str, Any]) -> None:
    """A field that left an object inside the status stayed there, and the status was written again and again."""
    written = merged(last, difference(new, last))
    assert written == new
    assert difference(new, written) == {}


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["Pending", "Running", "Failed", "Odd"]), st.text(max_size=8), st.integers(-5, 2**40))
def test_pods_with_odd_texts_are_read(phase: str, text: str, restarts: int) -> None:
    body = pod_body("a", ready=False, waiting=(text, text), last_exit=(restarts, text), cost=text, restarts=restarts)
    body["status"]["phase"] = phase
    body["metadata"]["creationTimestamp"] = text
    pod = parse_pod(body)
    intended = plan(llmd(), Observed(pods=(pod,)), SETTINGS)
    render(Facts(llmd=llmd(), observed=Observed(pods=(pod,)), plan=intended), History(), [], NOW)
