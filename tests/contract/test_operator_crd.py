"""The CRD and the operator's own validation are one contract."""

import re
from typing import Any

import pytest

from pagefleet_localcluster.api.cel_rules import compile_rule
from pagefleet_operator import fields, names
from pagefleet_operator.fleet import PodState
from pagefleet_operator.parsing import RESERVED_ARGS, RESERVED_ENV
from support.operator_crd import CRD, SCHEMA, SPEC, STATUS, VERSION, at, walk


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
