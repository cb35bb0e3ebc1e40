"""The CRD and the operator's own validation are one contract."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagefleet_localcluster.api.cel_rules import compile_rule, run_rules
from pagefleet_localcluster.api.schema import apply_defaults, prune
from pagefleet_localcluster.api.validation import validate
from pagefleet_operator import fields, names
from pagefleet_operator.errors import SpecError
from pagefleet_operator.fleet import PodState
from pagefleet_operator.model import LLMDeployment
from pagefleet_operator.parsing import RESERVED_ARGS, RESERVED_ENV, parse

CRD = yaml.safe_load((Path(__file__).resolve().parents[2] / "crds" / "llmdeployment.yaml").read_text())
VERSION = CRD["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
SPEC = SCHEMA["properties"]["spec"]
STATUS = SCHEMA["properties"]["status"]


def walk(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}")
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from walk(schema["additionalProperties"], f"{path}{{}}")


def at(path: str) -> dict[str, Any]:
    return dict(walk(SPEC, "spec"))[path]


def admit(body: dict[str, Any]) -> list[str]:
    """What the API server would say: defaults, then schema, then rules. Changes `body`."""
    metadata = body.pop("metadata")  # has its own schema in the API server
    unknown = prune(body, SCHEMA)
    body["metadata"] = metadata
    apply_defaults(body, SCHEMA)
    causes = validate(body, SCHEMA) or run_rules(body, None, SCHEMA)
    return [*unknown, *(f"{cause.field}: {cause.message}" for cause in causes)]


def test_names_match_the_code() -> None:
    spec = CRD["spec"]
    assert CRD["metadata"]["name"] == f"{names.PLURAL}.{names.GROUP}"
    assert (spec["group"], VERSION["name"], spec["names"]["kind"]) == (names.GROUP, names.VERSION, names.KIND)
    assert spec["names"]["shortNames"] == ["llmd"]
    assert spec["names"]["categories"] == ["pagefleet"]
    assert VERSION["subresources"]["scale"]["labelSelectorPath"] == ".status.selector"


def test_columns_point_at_fields_that_exist() -> None:
    columns = {column["name"]: column for column in VERSION["additionalPrinterColumns"]}
    assert list(columns) == [
        *("Model", "Ready", "Desired", "KV%", "Blocks", "Queue", "TTFT", "SLO", "Phase", "Age"),
        *("ITL", "Waiting-Blocks", "Last-Scale", "Reason"),
    ]
    known = {path for path, _ in walk(SCHEMA, "")} | {".metadata.creationTimestamp"}
    assert {column["jsonPath"] for column in columns.values()} <= known
    assert [name for name, column in columns.items() if column.get("priority")] == [
        "ITL",
        "Waiting-Blocks",
        "Last-Scale",
        "Reason",
    ]


@pytest.mark.parametrize(
    ("path", "schema"), list(walk(SCHEMA, "")), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_field_is_described_and_bounded(path: str, schema: dict[str, Any]) -> None:
    if path in ("", ".metadata"):
        return
    if not path.endswith(("[]", "{}")) or schema.get("type") == "object":
        assert schema.get("description"), f"{path} has no description"
    kind = schema.get("type")
    if path.startswith(".spec") and kind == "integer":
        assert {"minimum", "maximum"} <= schema.keys(), f"{path} has no bounds"
    if kind == "array":
        assert "maxItems" in schema, f"{path} is unbounded"
    free = schema.get("x-kubernetes-preserve-unknown-fields")
    if kind == "object" and "properties" not in schema and not free:
        assert "maxProperties" in schema, f"{path} is unbounded"
    if kind == "string" and path.startswith(".spec"):
        assert "enum" in schema or "maxLength" in schema, f"{path} is unbounded"


def test_everything_under_a_rule_is_bounded() -> None:
    """The API server estimates a rule's cost from these bounds and refuses the CRD when they are missing.

    Rules about the name are the whole object's, so that nothing is left out here but what the API server bounds itself.
    """
    assert "x-kubernetes-validations" in SCHEMA
    for path, schema in walk(SCHEMA, ""):
        if path in (".apiVersion", ".kind", ".metadata"):
            continue
        kind = schema.get("type")
        assert kind != "array" or "maxItems" in schema, path
        assert kind != "string" or {"maxLength", "enum"} & schema.keys() or schema.get("format") == "date-time", path
        assert kind != "object" or "additionalProperties" not in schema or "maxProperties" in schema, path


def test_rules_compile_and_use_only_cheap_functions() -> None:
    allowed = {"size", "matches", "all", "has", "startsWith"}
    for path, schema in walk(SCHEMA, ""):
        for rule in schema.get("x-kubernetes-validations", []):
            compile_rule(rule["rule"])
            assert rule["message"], path
            code = re.sub(r"'[^']*'", "''", rule["rule"])
            assert set(re.findall(r"(\w+)\(", code)) <= allowed, path


NUMBERS = {
    "spec.engine.maxNumSeqs": fields.MAX_NUM_SEQS,
    "spec.engine.accelerator.count": fields.ACCELERATOR_COUNT,
    "spec.engine.maxQueueLength": fields.MAX_QUEUE_LENGTH,
    "spec.engine.maxNumBatchedTokens": fields.MAX_NUM_BATCHED_TOKENS,
    "spec.engine.blockSize": fields.BLOCK_SIZE,
    "spec.engine.gpuMemoryUtilizationPercent": fields.GPU_MEMORY_PERCENT,
    "spec.model.maxModelLen": fields.MAX_MODEL_LEN,
    "spec.replicas": fields.REPLICAS,
    "spec.autoscaling.minReplicas": fields.MIN_REPLICAS,
    "spec.autoscaling.priority": fields.SCALING_PRIORITY,
    "spec.autoscaling.maxReplicas": fields.MAX_REPLICAS,
    "spec.autoscaling.targets.kvBlockOccupancyPercent": fields.KV_BLOCK_OCCUPANCY_PERCENT,
    "spec.autoscaling.targets.queuedRequestsPerReplica": fields.QUEUED_REQUESTS_PER_REPLICA,
    "spec.autoscaling.behavior.scaleUp.stabilizationWindowSeconds": fields.UP_WINDOW_SECONDS,
    "spec.autoscaling.behavior.scaleDown.stabilizationWindowSeconds": fields.DOWN_WINDOW_SECONDS,
    "spec.autoscaling.behavior.scaleUp.policies[].value": fields.POLICY_VALUE,
    "spec.autoscaling.behavior.scaleDown.policies[].value": fields.POLICY_VALUE,
    "spec.autoscaling.behavior.scaleUp.policies[].periodSeconds": fields.POLICY_PERIOD_SECONDS,
    "spec.autoscaling.behavior.scaleDown.policies[].periodSeconds": fields.POLICY_PERIOD_SECONDS,
    "spec.autoscaling.slo.percentile": fields.SLO_PERCENTILE,
    "spec.autoscaling.slo.timeToFirstTokenMilliseconds": fields.TTFT_MILLISECONDS,
    "spec.autoscaling.slo.interTokenLatencyMilliseconds": fields.ITL_MILLISECONDS,
    "spec.startup.timeoutSeconds": fields.STARTUP_TIMEOUT_SECONDS,
    "spec.drain.delaySeconds": fields.DRAIN_DELAY_SECONDS,
    "spec.drain.timeoutSeconds": fields.DRAIN_TIMEOUT_SECONDS,
    "spec.service.port": fields.SERVICE_PORT,
    "spec.rollout.maxSurge": fields.MAX_SURGE,
    "spec.rollout.maxUnavailable": fields.MAX_UNAVAILABLE,
    "spec.disruptionBudget.maxUnavailable": fields.BUDGET_MAX_UNAVAILABLE,
}
TEXTS = {
    "spec.model.source": fields.MODEL_SOURCE,
    "spec.model.servedName": fields.SERVED_NAME,
    "spec.model.revision": fields.REVISION,
    "spec.model.dtype": fields.DTYPE,
    "spec.model.tokenSecretRef.name": fields.REFERENCE,
    "spec.model.tokenSecretRef.key": fields.REFERENCE,
    "spec.model.cache.claimName": fields.OBJECT_NAME,
    "spec.model.cache.size": fields.CACHE_SIZE,
    "spec.model.cache.storageClassName": fields.OBJECT_NAME,
    "spec.model.cache.accessModes[]": fields.ACCESS_MODE,
    "spec.auth.apiKeysSecretRef.name": fields.REFERENCE,
    "spec.auth.apiKeysSecretRef.key": fields.REFERENCE,
    "spec.monitoring.podMonitor": fields.POD_MONITOR,
    "spec.networkPolicy.mode": fields.NETWORK_POLICY,
    "spec.networkPolicy.namespaces[]": fields.NAMESPACE,
    "spec.engine.image": fields.ENGINE_IMAGE,
    "spec.engine.accelerator.resourceName": fields.ACCELERATOR_RESOURCE,
    "spec.engine.kvCacheMemory": fields.KV_CACHE_MEMORY,
    "spec.engine.args[]": fields.ENGINE_ARG,
    "spec.engine.env[].name": fields.ENV_NAME,
    "spec.engine.env[].value": fields.ENV_VALUE,
    "spec.engine.env[].valueFrom.secretKeyRef.name": fields.REFERENCE,
    "spec.engine.env[].valueFrom.secretKeyRef.key": fields.REFERENCE,
    "spec.engine.env[].valueFrom.configMapKeyRef.name": fields.REFERENCE,
    "spec.engine.env[].valueFrom.configMapKeyRef.key": fields.REFERENCE,
    "spec.autoscaling.mode": fields.SCALING_MODE,
    "spec.placement": fields.PLACEMENT,
    "spec.service.type": fields.SERVICE_TYPE,
    "spec.autoscaling.behavior.scaleUp.selectPolicy": fields.SELECT_POLICY,
    "spec.autoscaling.behavior.scaleDown.selectPolicy": fields.SELECT_POLICY,
    "spec.autoscaling.behavior.scaleUp.policies[].type": fields.POLICY_TYPE,
    "spec.autoscaling.behavior.scaleDown.policies[].type": fields.POLICY_TYPE,
}


def test_every_leaf_of_the_spec_has_a_rule_in_the_code() -> None:
    leaves = {path for path, schema in walk(SPEC, "spec") if schema.get("type") in ("integer", "string")}
    assert leaves == NUMBERS.keys() | TEXTS.keys()


@pytest.mark.parametrize("path", NUMBERS)
def test_bounds_and_defaults_of_numbers_agree(path: str) -> None:
    schema, rule = at(path), NUMBERS[path]
    assert (schema["minimum"], schema["maximum"], schema.get("default")) == (rule.minimum, rule.maximum, rule.default)


def pattern_of(schema: dict[str, Any]) -> str | None:
    """From the schema, or from a rule that has a message for people."""
    rules = [rule["rule"] for rule in schema.get("x-kubernetes-validations", [])]
    found = [match[1] for rule in rules if (match := re.fullmatch(r"self\.matches\(r'(.*)'\)", rule))]
    return schema.get("pattern") or (found[0] if found else None)


@pytest.mark.parametrize("path", TEXTS)
def test_bounds_of_strings_agree(path: str) -> None:
    schema, rule = at(path), TEXTS[path]
    if rule.choices:
        assert tuple(schema["enum"]) == rule.choices
    else:
        have = (schema["maxLength"], schema.get("minLength", 0), pattern_of(schema))
        assert have == (rule.max_length, rule.min_length, rule.pattern)


def test_quantities_agree() -> None:
    for part in ("requests", "limits"):
        assert at(f"spec.resources.{part}{{}}")["pattern"] == fields.QUANTITY_PATTERN


def test_reserved_names_agree() -> None:
    args = at("spec.engine.args")["x-kubernetes-validations"][0]["rule"]
    assert all(name.removeprefix("--") in args for name in RESERVED_ARGS)
    env = at("spec.engine.env[].name")["x-kubernetes-validations"][0]["rule"]
    pattern = re.search(r"'([^']*)'", env)
    assert pattern is not None
    assert all(re.match(pattern.group(1), name) for name in RESERVED_ENV)


def test_pod_states_agree() -> None:
    assert STATUS["properties"]["pods"]["items"]["properties"]["state"]["enum"] == [state.value for state in PodState]


def body(spec: Any, name: str = "chat") -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "uid": "u", "generation": 1}
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "spec": spec}


MODEL = {"source": "file:///models/tiny"}
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
