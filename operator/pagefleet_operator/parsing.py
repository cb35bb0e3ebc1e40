"""An API object -> LLMDeployment, with the CRD's bounds and rules repeated. Pure.

The API server checks the same on admission; checking again here means that an object stored under an older CRD, or
by an API server without CEL, is reported (`Degraded`, reason `InvalidSpec`) instead of half applied.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pagefleet_operator import fields
from pagefleet_operator.errors import SpecError
from pagefleet_operator.model import (
    DEFAULT_SCALE_DOWN,
    DEFAULT_SCALE_UP,
    SHARED_ACCESS,
    Accelerator,
    AutoscalingSpec,
    EngineSpec,
    KeyRef,
    LLMDeployment,
    LLMDeploymentSpec,
    ModelCache,
    NetworkPolicySpec,
    ScalingPolicy,
    ScalingRules,
    Slo,
)
from pagefleet_operator.names import MAX_NAME_LENGTH, ObjectKey, is_valid_name
from pagefleet_operator.template import problems_of

TOKEN_VARIABLE = "HF_TOKEN"

RESERVED_ARGS = ("--host", "--port", "--model", "--served-model-name", "--drain-delay", "--drain-timeout")
"""Flags of the server that only the operator sets: probes, Service and grace period follow from them."""

RESERVED_ENV = (
    "POD_IP",
    "TMPDIR",
    "PAGEFLEET_HOST",
    "PAGEFLEET_PORT",
    "PAGEFLEET_MODEL",
    "PAGEFLEET_SERVED_MODEL_NAME",
    "PAGEFLEET_DRAIN_DELAY",
    "PAGEFLEET_DRAIN_TIMEOUT",
)
"""Environment variables that only the operator sets, for the same reason."""


def parse(body: Mapping[str, Any], *, spec: LLMDeploymentSpec | None = None) -> LLMDeployment:
    """An API object -> LLMDeployment. `spec`: what an earlier call made of the same name and spec.

    Raises SpecError with every problem found.
    """
    metadata = body["metadata"]
    name = metadata["name"]
    if spec is None:
        spec = _checked_spec(body, name)
    return LLMDeployment(
        key=ObjectKey(metadata["namespace"], name),
        uid=metadata["uid"],
        resource_version=metadata.get("resourceVersion", ""),
        generation=metadata.get("generation", 0),
        spec=spec,
        status=body.get("status") or {},
    )


def _checked_spec(body: Mapping[str, Any], name: str) -> LLMDeploymentSpec:
    problems: list[str] = []
    if not is_valid_name(name):
        problems.append(
            f"metadata.name: {name!r} must be a DNS-1035 label of at most {MAX_NAME_LENGTH} characters; "
            "create the object under another name"
        )
    spec = _parse_spec(fields.Reader(body.get("spec"), "spec", problems), name)
    if spec is None or problems:
        raise SpecError(problems)
    return spec


def _parse_spec(spec: fields.Reader, name: str) -> LLMDeploymentSpec | None:
    model = spec.object("model")
    source = model.text("source", fields.MODEL_SOURCE)
    if source is None:
        if not any(problem.startswith("spec.model.source") for problem in spec.problems):
            model.problem("source", "is required, as file:///path, pvc://claim/path or hf://org/name")
        return None
    kind, _, rest = source.partition("://")
    claim = rest.partition("/")[0] if kind == "pvc" else None
    path = {"pvc": rest.partition("/")[2], "hf": source}.get(kind, rest)
    engine = _parse_engine(spec.object("engine"))
    if kind != "hf":
        for member in ("revision", "tokenSecretRef", "cache"):
            if model.has(member):
                model.problem(member, "goes with a source hf:// only")
    token = _parse_key(model, "tokenSecretRef")
    if token is not None and any(entry.get("name") == TOKEN_VARIABLE for entry in engine.env):
        spec.problem("engine.env", f"must not hold {TOKEN_VARIABLE} beside model.tokenSecretRef, which sets it")
    placement = spec.text("placement", fields.PLACEMENT) or "Pod"
    startup, drain = spec.object("startup"), spec.object("drain")
    service, rollout = spec.object("service"), spec.object("rollout")
    max_surge = rollout.number("maxSurge", fields.MAX_SURGE)
    max_unavailable = rollout.number("maxUnavailable", fields.MAX_UNAVAILABLE)
    if max_surge == 0 and max_unavailable == 0:
        rollout.problem("maxSurge", "and maxUnavailable must not both be 0: a rollout could not begin")
    made = LLMDeploymentSpec(
        model_path=path,
        revision=model.text("revision", fields.REVISION),
        token=token,
        cache=_parse_cache(model.object("cache")) if model.has("cache") else None,
        dtype=model.text("dtype", fields.DTYPE),
        max_model_len=model.optional_number("maxModelLen", fields.MAX_MODEL_LEN),
        api_keys=_parse_key(spec.object("auth"), "apiKeysSecretRef"),
        pod_monitor=spec.object("monitoring").text("podMonitor", fields.POD_MONITOR) != "Disabled",
        network_policy=_parse_network_policy(spec.object("networkPolicy")),
        model_claim=claim,
        served_name=model.text("servedName", fields.SERVED_NAME) or name,
        engine=engine,
        replicas=spec.number("replicas", fields.REPLICAS),
        autoscaling=_parse_autoscaling(spec.object("autoscaling")) if spec.has("autoscaling") else None,
        startup_timeout_seconds=startup.number("timeoutSeconds", fields.STARTUP_TIMEOUT_SECONDS),
        drain_delay_seconds=drain.number("delaySeconds", fields.DRAIN_DELAY_SECONDS),
        drain_timeout_seconds=drain.number("timeoutSeconds", fields.DRAIN_TIMEOUT_SECONDS),
        resources=_parse_resources(spec.object("resources"), engine),
        placement=placement,
        template=_parse_template(spec, placement),
        service_type=service.text("type", fields.SERVICE_TYPE) or "ClusterIP",
        service_port=service.number("port", fields.SERVICE_PORT),
        max_surge=max_surge,
        max_unavailable=max_unavailable,
        budget_max_unavailable=spec.object("disruptionBudget").number("maxUnavailable", fields.BUDGET_MAX_UNAVAILABLE),
    )
    if made.cache is not None and made.cache.size and not is_shared(made.cache.access_modes, made.most_pods):
        model.problem("cache.accessModes", not_shared(made.most_pods))
    return made


def is_shared(access_modes: Sequence[str], pods: int) -> bool:
    """Whether so many pods, perhaps on several nodes, may write to a claim with these modes."""
    return pods <= 1 or SHARED_ACCESS in access_modes


def not_shared(pods: int) -> str:
    """What is wrong when they may not."""
    return (
        f"must hold {SHARED_ACCESS}: up to {pods} replicas (rollout.maxSurge included) would need the volume on "
        "several nodes; otherwise replicas and autoscaling.maxReplicas must be at most 1 and rollout.maxSurge 0"
    )


def _parse_key(parent: fields.Reader, name: str) -> KeyRef | None:
    if not parent.has(name):
        return None
    reference = parent.object(name)
    found = [reference.text(part, fields.REFERENCE) for part in ("name", "key")]
    for part in ("name", "key"):
        if not reference.has(part):
            reference.problem(part, "is required")
    return KeyRef(found[0] or "", found[1] or "")


def _parse_cache(cache: fields.Reader) -> ModelCache:
    claim = cache.text("claimName", fields.OBJECT_NAME)
    size = cache.text("size", fields.CACHE_SIZE)
    if cache.has("claimName") == cache.has("size"):
        cache.problem("claimName", "and size: give exactly one of them, a claim that is there or the size of a new one")
    modes = cache.texts("accessModes", fields.ACCESS_MODE, max_items=fields.MAX_ACCESS_MODES)
    if cache.value.get("accessModes") == []:
        cache.problem("accessModes", "must hold at least one mode")
    return ModelCache(claim, size or "", cache.text("storageClassName", fields.OBJECT_NAME), modes or (SHARED_ACCESS,))


def _parse_network_policy(policy: fields.Reader) -> NetworkPolicySpec:
    return NetworkPolicySpec(
        restricted=policy.text("mode", fields.NETWORK_POLICY) == "Restricted",
        namespaces=policy.texts("namespaces", fields.NAMESPACE, max_items=fields.MAX_NAMESPACES),
    )


def _parse_template(spec: fields.Reader, placement: str) -> Mapping[str, Any]:
    template = spec.value.get("template")
    if template is None:
        if placement == "Sidecar":
            spec.problem("template", "must hold the containers beside which the sidecar runs")
        return {}
    found = list(problems_of(template, "spec.template", placement))
    spec.problems.extend(found)
    return {} if found else dict(template)


def _parse_engine(engine: fields.Reader) -> EngineSpec:
    args = engine.texts("args", fields.ENGINE_ARG, max_items=fields.MAX_ENGINE_ITEMS)
    if any(arg.split("=", 1)[0] in RESERVED_ARGS for arg in args):
        engine.problem("args", f"must not hold {', '.join(RESERVED_ARGS)}: the operator sets them from other fields")
    return EngineSpec(
        image=engine.text("image", fields.ENGINE_IMAGE),
        accelerator=_parse_accelerator(engine.object("accelerator")) if engine.has("accelerator") else None,
        kv_cache_memory=engine.text("kvCacheMemory", fields.KV_CACHE_MEMORY),
        gpu_memory_percent=engine.optional_number("gpuMemoryUtilizationPercent", fields.GPU_MEMORY_PERCENT),
        block_size=_parse_block_size(engine),
        prefix_caching=engine.flag("prefixCaching"),
        max_num_seqs=engine.optional_number("maxNumSeqs", fields.MAX_NUM_SEQS),
        max_num_batched_tokens=engine.optional_number("maxNumBatchedTokens", fields.MAX_NUM_BATCHED_TOKENS),
        max_queue_length=engine.optional_number("maxQueueLength", fields.MAX_QUEUE_LENGTH),
        args=args,
        env=_parse_env(engine),
    )


def _parse_block_size(engine: fields.Reader) -> int | None:
    size = engine.optional_number("blockSize", fields.BLOCK_SIZE)
    if size is not None and size & (size - 1):
        engine.problem("blockSize", f"{size} must be a power of two")
    return size


def _parse_accelerator(accelerator: fields.Reader) -> Accelerator:
    name = accelerator.text("resourceName", fields.ACCELERATOR_RESOURCE)
    if not accelerator.has("resourceName"):
        accelerator.problem("resourceName", "is required, like nvidia.com/gpu")
    return Accelerator(name or "", accelerator.number("count", fields.ACCELERATOR_COUNT))


def _parse_env(engine: fields.Reader) -> tuple[Mapping[str, Any], ...]:
    entries = engine.objects("env", max_items=fields.MAX_ENGINE_ITEMS)
    names = [entry.text("name", fields.ENV_NAME) for entry in entries]
    for entry, name in zip(entries, names, strict=True):
        if name is None:
            entry.problem("name", "is required")
        elif name in RESERVED_ENV:
            entry.problem("name", f"{name} is set by the operator from other fields")
        if names.count(name) > 1:
            entry.problem("name", f"{name} appears more than once")
        entry.text("value", fields.ENV_VALUE)
        if entry.has("value") and entry.has("valueFrom"):
            entry.problem("valueFrom", "stands beside value; give one of them")
        if entry.has("valueFrom"):
            source = entry.object("valueFrom")
            kinds = [kind for kind in ("secretKeyRef", "configMapKeyRef") if source.has(kind)]
            if len(kinds) != 1:
                entry.problem("valueFrom", "takes exactly one of secretKeyRef and configMapKeyRef")
            for kind in kinds:
                for part in ("name", "key"):
                    if source.object(kind).text(part, fields.REFERENCE) is None:
                        source.object(kind).problem(part, "is required")
    return tuple(entry.value for entry in entries)


def _parse_autoscaling(autoscaling: fields.Reader) -> AutoscalingSpec:
    minimum = autoscaling.number("minReplicas", fields.MIN_REPLICAS)
    maximum = autoscaling.optional_number("maxReplicas", fields.MAX_REPLICAS)
    if maximum is None:
        autoscaling.problem("maxReplicas", "is required")
        maximum = minimum
    if minimum > maximum:
        autoscaling.problem("minReplicas", f"{minimum} must not be above autoscaling.maxReplicas, {maximum}")
    targets, behavior = autoscaling.object("targets"), autoscaling.object("behavior")
    return AutoscalingSpec(
        max_replicas=maximum,
        min_replicas=minimum,
        kv_block_occupancy_percent=targets.number("kvBlockOccupancyPercent", fields.KV_BLOCK_OCCUPANCY_PERCENT),
        queued_requests_per_replica=targets.number("queuedRequestsPerReplica", fields.QUEUED_REQUESTS_PER_REPLICA),
        scale_up=_parse_rules(behavior.object("scaleUp"), fields.UP_WINDOW_SECONDS, DEFAULT_SCALE_UP),
        mode=autoscaling.text("mode", fields.SCALING_MODE) or "Managed",
        priority=autoscaling.number("priority", fields.SCALING_PRIORITY),
        slo=_parse_slo(autoscaling.object("slo")) if autoscaling.has("slo") else None,
        scale_down=_parse_rules(behavior.object("scaleDown"), fields.DOWN_WINDOW_SECONDS, DEFAULT_SCALE_DOWN),
    )


def _parse_slo(slo: fields.Reader) -> Slo:
    first_token = slo.optional_number("timeToFirstTokenMilliseconds", fields.TTFT_MILLISECONDS)
    inter_token = slo.optional_number("interTokenLatencyMilliseconds", fields.ITL_MILLISECONDS)
    if not slo.has("timeToFirstTokenMilliseconds") and not slo.has("interTokenLatencyMilliseconds"):
        slo.problem("timeToFirstTokenMilliseconds", "or interTokenLatencyMilliseconds must be given")
    return Slo(
        percentile=slo.number("percentile", fields.SLO_PERCENTILE),
        time_to_first_token_ms=first_token,
        inter_token_latency_ms=inter_token,
    )


def _parse_rules(rules: fields.Reader, window: fields.Number, defaults: ScalingRules) -> ScalingRules:
    if rules.value.get("policies") == []:
        rules.problem("policies", "must hold at least one policy; leave it out for the default")
    policies = tuple(
        ScalingPolicy(
            type=policy.text("type", fields.POLICY_TYPE) or "Pods",
            value=policy.required_number("value", fields.POLICY_VALUE),
            period_seconds=policy.required_number("periodSeconds", fields.POLICY_PERIOD_SECONDS),
        )
        for policy in rules.objects("policies", max_items=fields.MAX_POLICIES)
    )
    return ScalingRules(
        stabilization_window_seconds=rules.number("stabilizationWindowSeconds", window),
        select_policy=rules.text("selectPolicy", fields.SELECT_POLICY) or defaults.select_policy,
        policies=policies or defaults.policies,
    )


def _parse_resources(resources: fields.Reader, engine: EngineSpec) -> Mapping[str, Mapping[str, Any]]:
    parsed: dict[str, Mapping[str, Any]] = {}
    device = engine.accelerator.resource_name if engine.accelerator else None
    for part in ("requests", "limits"):
        if resources.has(part):
            amounts = resources.object(part)
            for resource in amounts.value:
                amounts.quantity(resource)
            if device in amounts.value:
                amounts.problem(str(device), "is set by engine.accelerator; leave it out here")
            parsed[part] = dict(amounts.value)
    return parsed
