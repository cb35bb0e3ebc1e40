"""What the CRD refuses and admits, the operator refuses and admits too."""

import copy
import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagefleet_operator.errors import SpecError
from pagefleet_operator.model import LLMDeployment
from pagefleet_operator.parsing import parse
from support.operator_crd import MODEL, SPEC, admit, body

HUB = {"source": "hf://org/name"}
ALONE = {"size": "1Gi", "accessModes": ["ReadWriteOnce"]}
NO_SURGE = {"maxSurge": 0, "maxUnavailable": 1}
REFUSED: dict[str, tuple[Any, str]] = {
    "no model": ({}, "spec.model"),
    "no source": ({"model": {}}, "spec.model.source"),
    "a source of another kind": ({"model": {"source": "s3://bucket/name"}}, "spec.model.source"),
    "a hub's model without its organisation": ({"model": {"source": "hf://name-alone"}}, "spec.model.source"),
    "a hub's model with its revision in the name": ({"model": {"source": "hf://org/name@main"}}, "spec.model.source"),
    "a source with a line break": ({"model": {"source": "file:///a\nb"}}, "spec.model.source"),
    "a revision of a path": ({"model": {**MODEL, "revision": "main"}}, "model.revision"),
    "a token for a path": ({"model": {**MODEL, "tokenSecretRef": {"name": "a", "key": "b"}}}, "model.tokenSecretRef"),
    "a cache for a path": ({"model": {**MODEL, "cache": {"size": "1Gi"}}}, "model.cache"),
    "a cache of two kinds": ({"model": {**HUB, "cache": {"size": "1Gi", "claimName": "c"}}}, "model.cache"),
    "a cache of no kind": ({"model": {**HUB, "cache": {}}}, "model.cache"),
    "a cache without a unit": ({"model": {**HUB, "cache": {"size": "100"}}}, "model.cache.size"),
    "an access mode that cannot be written to": (
        {"model": {**HUB, "cache": {"size": "1Gi", "accessModes": ["ReadOnlyMany"]}}},
        "model.cache.accessModes",
    ),
    "a volume of one node for two replicas": (
        {"model": {**HUB, "cache": ALONE}, "replicas": 2, "rollout": NO_SURGE},
        "model.cache.accessModes",
    ),
    "a volume of one node for a fleet that may grow": (
        {"model": {**HUB, "cache": ALONE}, "autoscaling": {"maxReplicas": 2}, "rollout": NO_SURGE},
        "model.cache.accessModes",
    ),
    "a volume of one node for a rollout that adds one": ({"model": {**HUB, "cache": ALONE}}, "model.cache.accessModes"),
    "a token twice": (
        {
            "model": {**HUB, "tokenSecretRef": {"name": "a", "key": "b"}},
            "engine": {"env": [{"name": "HF_TOKEN", "value": "x"}]},
        },
        "engine.env",
    ),
    "blocks that are no power of two": ({"model": MODEL, "engine": {"blockSize": 24}}, "engine.blockSize"),
    "prefix caching by a word": ({"model": MODEL, "engine": {"prefixCaching": "yes"}}, "engine.prefixCaching"),
    "keys without a key": ({"model": MODEL, "auth": {"apiKeysSecretRef": {"name": "s"}}}, "auth.apiKeysSecretRef.key"),
    "a namespace that cannot be": (
        {"model": MODEL, "networkPolicy": {"namespaces": ["A_b"]}},
        "networkPolicy.namespaces",
    ),
    "a source with a variable": ({"model": {"source": "file:///$(HOME)/x"}}, "spec.model.source"),
    "negative replicas": ({"model": MODEL, "replicas": -1}, "spec.replicas"),
    "replicas as text": ({"model": MODEL, "replicas": "2"}, "spec.replicas"),
    "memory without a unit": ({"model": MODEL, "engine": {"kvCacheMemory": "512"}}, "spec.engine.kvCacheMemory"),
    "a reserved flag": ({"model": MODEL, "engine": {"args": ["--host=0.0.0.0"]}}, "engine.args"),
    "a reserved flag in two words": ({"model": MODEL, "engine": {"args": ["--port", "1"]}}, "engine.args"),
    "a reserved variable": ({"model": MODEL, "engine": {"env": [{"name": "PAGEFLEET_HOST"}]}}, "engine.env"),
    "a variable twice": ({"model": MODEL, "engine": {"env": [{"name": "A"}, {"name": "A"}]}}, "engine.env"),
    "two values": (
        {
            "model": MODEL,
            "engine": {"env": [{"name": "A", "value": "1", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
        },
        "engine.env",
    ),
    "no kind of reference": ({"model": MODEL, "engine": {"env": [{"name": "A", "valueFrom": {}}]}}, "engine.env"),
    "min above max": ({"model": MODEL, "autoscaling": {"minReplicas": 3, "maxReplicas": 2}}, "autoscaling"),
    "no max": ({"model": MODEL, "autoscaling": {}}, "autoscaling.maxReplicas"),
    "a policy without period": (
        {
            "model": MODEL,
            "autoscaling": {"maxReplicas": 2, "behavior": {"scaleUp": {"policies": [{"type": "Pods", "value": 1}]}}},
        },
        "periodSeconds",
    ),
    "an objective of nothing": ({"model": MODEL, "autoscaling": {"maxReplicas": 2, "slo": {}}}, "autoscaling.slo"),
    "a device twice": (
        {
            "model": MODEL,
            "engine": {"accelerator": {"resourceName": "nvidia.com/gpu"}},
            "resources": {"limits": {"nvidia.com/gpu": 1}},
        },
        "spec",
    ),
    "a device without a domain": ({"model": MODEL, "engine": {"accelerator": {"resourceName": "gpu"}}}, "resourceName"),
    "a claim without a path": ({"model": {"source": "pvc://models"}}, "spec.model.source"),
    "a sidecar of nothing": ({"model": MODEL, "placement": "Sidecar"}, "template"),
    "no policy at all": (
        {"model": MODEL, "autoscaling": {"maxReplicas": 2, "behavior": {"scaleUp": {"policies": []}}}},
        "scaleUp.policies",
    ),
    "a bad quantity": ({"model": MODEL, "resources": {"limits": {"memory": "much"}}}, "spec.resources.limits.memory"),
    "a rollout that cannot begin": ({"model": MODEL, "rollout": {"maxSurge": 0, "maxUnavailable": 0}}, "rollout"),
    "a list for an object": ({"model": MODEL, "drain": []}, "spec.drain"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_specs_are_refused_with_the_field_by_both(case: str) -> None:
    spec, want = REFUSED[case]
    with pytest.raises(SpecError, match=re.escape(want)):
        parse(body(spec))
    said = admit(body(copy.deepcopy(spec)))
    assert said, "the CRD admits it"
    assert any(want.removeprefix("spec.") in text for text in said), said


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"source": "file:///my models/tiny (1).gguf"}},
        {"model": {"source": "hf://org/name-1.5B", "revision": "refs/pr/1"}},
        {"model": {"source": "hf://org/name/sub/q4_0.gguf", "cache": {"claimName": "c"}}},
        {"model": {**HUB, "cache": ALONE}, "rollout": NO_SURGE},
        {"model": {**HUB, "cache": {"size": "2Ti"}}, "replicas": 5},
    ],
)
def test_what_can_work_is_admitted_by_both(spec: dict[str, Any]) -> None:
    parse(body(spec))
    assert admit(body(copy.deepcopy(spec))) == []


@pytest.mark.parametrize("name", ["a" * 46, "1abc", "a.b", "-a", "a-"])
def test_bad_names_are_refused_by_both(name: str) -> None:
    with pytest.raises(SpecError, match=r"metadata\.name"):
        parse(body({"model": MODEL}, name=name))
    assert any("metadata.name" in text for text in admit(body({"model": MODEL}, name=name)))


def test_defaults_of_the_crd_are_the_defaults_of_the_code() -> None:
    sparse = body({"model": MODEL, "autoscaling": {"maxReplicas": 4}})
    full = copy.deepcopy(sparse)
    assert admit(full) == []
    assert full != sparse
    assert parse(full) == parse(sparse)


def values_of(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values near the schema: mostly right, sometimes just beyond a bound."""
    if schema.get("x-kubernetes-int-or-string"):
        return st.sampled_from([1, 0, "500m", "8Gi", "1.5", "x", "-1", True])
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return st.just({"spec": {"containers": [{"name": "app", "image": "app:1"}]}})
    kind = schema.get("type")
    if "enum" in schema:
        return st.sampled_from([*schema["enum"], "Other"])
    if kind == "boolean":
        return st.sampled_from([True, False, "true"])
    if kind == "integer":
        low, high = schema["minimum"], schema["maximum"]
        return st.sampled_from([low - 1, low, low + 1, high, high + 1]) | st.integers(low, high)
    if kind == "array":
        return st.lists(values_of(schema["items"]), max_size=3)
    if kind == "string":
        return st.sampled_from(
            [
                "file:///m",
                "hf://a/b",
                "hf://a/b/c.gguf",
                "100Gi",
                "HF_TOKEN",
                "chat",
                "a b",
                "",
                "8Gi",
                "16Mi",
                "--x",
                "--host",
                "A",
                "POD_IP",
                "a/b",
                "x" * 600,
            ]
        )
    optional = {name: values_of(child) for name, child in schema.get("properties", {}).items()}
    if isinstance(schema.get("additionalProperties"), dict):
        return st.dictionaries(
            st.sampled_from(["cpu", "memory", "nvidia.com/gpu"]), values_of(schema["additionalProperties"])
        )
    required = {name: optional.pop(name) for name in schema.get("required", [])}
    return st.fixed_dictionaries(required, optional=optional)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values_of(SPEC))
def test_schema_and_code_admit_the_same_specs(spec: dict[str, Any]) -> None:
    said = admit(body(copy.deepcopy(spec)))
    try:
        parsed: LLMDeployment | None = parse(body(spec))
        problems: list[str] = []
    except SpecError as error:
        parsed, problems = None, error.problems
    assert (parsed is not None) == (not said), (json.dumps(spec), said, problems)
