"""Manifests of the children: what is sent with server-side apply, so exactly the fields that we own. Pure."""

import math
from typing import Any

from pagefleet_operator import names
from pagefleet_operator.model import HUB, EngineSpec, LLMDeployment, LLMDeploymentSpec, ModelCache
from pagefleet_operator.settings import ChildSettings
from pagefleet_operator.template import merged

Manifest = dict[str, Any]
"""A Kubernetes object as JSON."""

SCRATCH_VOLUME = "scratch"
SCRATCH_PATH = "/var/cache/pagefleet"
"""The one place where the server may write: its root file system is read-only."""

MODEL_VOLUME = "model"
MODEL_PATH = "/var/lib/pagefleet/model"
"""Where a claim with the model is mounted, read-only."""
CACHE_VOLUME = "model-cache"
CACHE_PATH = "/var/lib/pagefleet/models"
"""Where the claim that keeps a hub's model is mounted."""
CACHE_GROUP = {"fsGroup": 10001, "fsGroupChangePolicy": "OnRootMismatch"}
"""A new volume belongs to root: this group may write to it, whatever user the image has."""
KEYS_VOLUME = "api-keys"
KEYS_PATH = "/etc/pagefleet/auth"
KEYS_FILE = "api-keys"
SHARED_MEMORY_VOLUME = "shared-memory"

PROGRESS_MARGIN_SECONDS = 60
"""Beyond the startup budget: scheduling and the pull of the image."""


def owner_reference(llmd: LLMDeployment) -> Manifest:
    """Makes the garbage collector delete a child with its LLMDeployment, also when no operator runs."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": llmd.key.name,
        "uid": llmd.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _metadata(llmd: LLMDeployment) -> Manifest:
    return {
        "name": llmd.key.name,
        "namespace": llmd.key.namespace,
        "labels": names.labels(llmd.key.name),
        "ownerReferences": [owner_reference(llmd)],
    }


def service(llmd: LLMDeployment) -> Manifest:
    """The Service: its port to the named port of every ready replica."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(llmd),
        "spec": {
            "type": llmd.spec.service_type,
            "selector": names.selector(llmd.key.name),
            "ports": [
                {
                    "name": names.PORT_NAME,
                    "port": llmd.spec.service_port,
                    # Older API servers do not look for named ports in sidecars.
                    "targetPort": names.SERVER_PORT if llmd.spec.placement == "Sidecar" else names.PORT_NAME,
                    "protocol": "TCP",
                }
            ],
        },
    }


def service_account(llmd: LLMDeployment) -> Manifest:
    """The pods' own identity, without any right and without a token."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": _metadata(llmd),
        "automountServiceAccountToken": False,
    }


def disruption_budget(llmd: LLMDeployment) -> Manifest:
    """Bounds how many replicas a drain of nodes takes at once; broken ones never hold it up."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(llmd),
        "spec": {
            "maxUnavailable": llmd.spec.budget_max_unavailable,
            "selector": {"matchLabels": names.selector(llmd.key.name)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def cache_claim(llmd: LLMDeployment, cache: ModelCache) -> Manifest:
    """The claim that keeps a hub's model."""
    spec: Manifest = {"accessModes": list(cache.access_modes), "resources": {"requests": {"storage": cache.size}}}
    if cache.storage_class is not None:
        spec["storageClassName"] = cache.storage_class
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": _metadata(llmd), "spec": spec}


def pod_monitor(llmd: LLMDeployment) -> Manifest:
    """Tells the Prometheus operator to scrape the replicas."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": _metadata(llmd),
        "spec": {
            "selector": {"matchLabels": names.selector(llmd.key.name)},
            "podTargetLabels": [names.LABEL_OWNER],
            "podMetricsEndpoints": [{"port": names.PORT_NAME, "path": "/metrics", "interval": "15s"}],
        },
    }


def network_policy(llmd: LLMDeployment, settings: ChildSettings) -> Manifest:
    """Who may reach the server; other ports of a sidecar's pod are the user's and stay open."""

    def namespace(name: str) -> Manifest:
        return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}

    home = settings.operator_namespace
    operator = {
        **(namespace(home) if home is not None else {"namespaceSelector": {}}),
        "podSelector": {"matchLabels": {names.LABEL_APP: names.FIELD_MANAGER}},
    }
    admitted = dict.fromkeys((*llmd.spec.network_policy.namespaces, settings.monitoring_namespace))
    rules: list[Manifest] = [
        {
            "ports": [{"protocol": "TCP", "port": names.SERVER_PORT}],
            "from": [{"podSelector": {}}, operator, *(namespace(name) for name in admitted)],
        }
    ]
    if llmd.spec.placement == "Sidecar":
        rules.append(
            {
                "ports": [
                    {"protocol": "TCP", "port": 1, "endPort": names.SERVER_PORT - 1},
                    {"protocol": "TCP", "port": names.SERVER_PORT + 1, "endPort": 65535},
                    {"protocol": "UDP", "port": 1, "endPort": 65535},
                ]
            }
        )
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(llmd),
        "spec": {
            "podSelector": {"matchLabels": names.selector(llmd.key.name)},
            "policyTypes": ["Ingress"],
            "ingress": rules,
        },
    }


def deployment(llmd: LLMDeployment, settings: ChildSettings, *, replicas: int) -> Manifest:
    """The Deployment with `replicas` servers."""
    spec = llmd.spec
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(llmd),
        "spec": {
            "replicas": replicas,
            "paused": False,  # ours, so that a pause is undone and said like any other edit
            "selector": {"matchLabels": names.selector(llmd.key.name)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": spec.max_surge, "maxUnavailable": spec.max_unavailable},
            },
            "progressDeadlineSeconds": spec.startup_timeout_seconds + PROGRESS_MARGIN_SECONDS,
            "template": merged(_pod_template(llmd, settings), spec.template),
        },
    }


def _pod_template(llmd: LLMDeployment, settings: ChildSettings) -> Manifest:
    spec = llmd.spec
    grace = spec.drain_delay_seconds + spec.drain_timeout_seconds + settings.grace_margin_seconds
    return {
        "metadata": {"labels": names.labels(llmd.key.name)},
        "spec": {
            "serviceAccountName": llmd.key.name,
            "terminationGracePeriodSeconds": grace,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
                **(CACHE_GROUP if spec.cache is not None else {}),
            },
            "topologySpreadConstraints": [_spread(llmd)],
            "volumes": _volumes(llmd),
            **_tolerations(spec.engine),
            **_placed(spec.placement, _server(llmd, settings)),
        },
    }


def _placed(placement: str, server: Manifest) -> Manifest:
    """The server as the pod's container, or as a native sidecar: up before the others and down after them."""
    if placement == "Sidecar":
        return {"initContainers": [{**server, "restartPolicy": "Always"}], "containers": []}
    return {"containers": [server]}


def _server(llmd: LLMDeployment, settings: ChildSettings) -> Manifest:
    spec = llmd.spec
    container: Manifest = {
        "name": names.CONTAINER,
        "image": spec.engine.image or settings.server_image,
        "command": ["pagefleet-server"],
        "args": _args(llmd),
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "TMPDIR", "value": SCRATCH_PATH},
            *_token(spec),
            *(dict(entry) for entry in spec.engine.env),
        ],
        "volumeMounts": _mounts(spec),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "ports": [{"name": names.PORT_NAME, "containerPort": names.SERVER_PORT, "protocol": "TCP"}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **_probes(spec.startup_timeout_seconds, settings.probe_period_seconds),
    }
    resources = _resources(spec)
    if resources:
        container["resources"] = resources
    return container


def _resources(spec: LLMDeploymentSpec) -> Manifest:
    resources: Manifest = {part: dict(amounts) for part, amounts in spec.resources.items()}
    device = spec.engine.accelerator
    if device is not None:
        for part in ("requests", "limits"):  # extended resources: both, and equal
            resources[part] = {**resources.get(part, {}), device.resource_name: str(device.count)}
    return resources


def _token(spec: LLMDeploymentSpec) -> list[Manifest]:
    if spec.token is None:
        return []
    return [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": spec.token.name, "key": spec.token.key}}}]


def _volumes(llmd: LLMDeployment) -> list[Manifest]:
    spec = llmd.spec
    volumes: list[Manifest] = [{"name": SCRATCH_VOLUME, "emptyDir": {}}]
    if spec.model_claim is not None:
        claim = {"claimName": spec.model_claim, "readOnly": True}
        volumes.append({"name": MODEL_VOLUME, "persistentVolumeClaim": claim})
    if spec.cache is not None:
        claim_name = spec.cache.claim or llmd.key.name
        volumes.append({"name": CACHE_VOLUME, "persistentVolumeClaim": {"claimName": claim_name}})
    if spec.api_keys is not None:
        items = [{"key": spec.api_keys.key, "path": KEYS_FILE}]
        volumes.append({"name": KEYS_VOLUME, "secret": {"secretName": spec.api_keys.name, "items": items}})
    if spec.engine.accelerator is not None:
        volumes.append({"name": SHARED_MEMORY_VOLUME, "emptyDir": {"medium": "Memory"}})
    return volumes


def _mounts(spec: LLMDeploymentSpec) -> list[Manifest]:
    mounts: list[Manifest] = [{"name": SCRATCH_VOLUME, "mountPath": SCRATCH_PATH}]
    if spec.model_claim is not None:
        mounts.append({"name": MODEL_VOLUME, "mountPath": MODEL_PATH, "readOnly": True})
    if spec.cache is not None:
        mounts.append({"name": CACHE_VOLUME, "mountPath": CACHE_PATH})
    if spec.api_keys is not None:
        mounts.append({"name": KEYS_VOLUME, "mountPath": KEYS_PATH, "readOnly": True})
    if spec.engine.accelerator is not None:
        mounts.append({"name": SHARED_MEMORY_VOLUME, "mountPath": "/dev/shm"})
    return mounts


def _tolerations(engine: EngineSpec) -> Manifest:
    """Nodes with devices are usually tainted with the device's name."""
    device = engine.accelerator
    if device is None:
        return {}
    return {"tolerations": [{"key": device.resource_name, "operator": "Exists", "effect": "NoSchedule"}]}


def _spread(llmd: LLMDeployment) -> Manifest:
    """Replicas on different nodes where there is a choice."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": names.selector(llmd.key.name)},
    }


def _args(llmd: LLMDeployment) -> list[str]:
    spec = llmd.spec
    return [
        "--model",
        _model(spec),
        "--served-model-name",
        spec.served_name,
        *_model_args(spec),
        *_engine_args(spec.engine),
        "--drain-delay",
        str(spec.drain_delay_seconds),
        "--drain-timeout",
        str(spec.drain_timeout_seconds),
        *spec.engine.args,
    ]


def _model(spec: LLMDeploymentSpec) -> str:
    """hf://org/name@revision/file.gguf, or a path."""
    if spec.model_claim is not None:
        return f"{MODEL_PATH}/{spec.model_path}"
    if not spec.is_of_hub or spec.revision is None:
        return spec.model_path
    org, name, *file = spec.model_path.removeprefix(HUB).split("/")
    return "/".join([f"{HUB}{org}", f"{name}@{spec.revision}", *file])


def _model_args(spec: LLMDeploymentSpec) -> list[str]:
    args: list[str] = []
    if spec.is_of_hub:
        args += ["--download-dir", CACHE_PATH if spec.cache is not None else f"{SCRATCH_PATH}/models"]
    if spec.dtype is not None:
        args += ["--dtype", spec.dtype]
    if spec.max_model_len is not None:
        args += ["--max-model-len", str(spec.max_model_len)]
    if spec.api_keys is not None:
        args += ["--api-key-file", f"{KEYS_PATH}/{KEYS_FILE}"]
    return args


def _engine_args(engine: EngineSpec) -> list[str]:
    args: list[str] = []
    if engine.accelerator is not None and engine.accelerator.count > 1:
        args += ["--tensor-parallel-size", str(engine.accelerator.count)]
    if engine.gpu_memory_percent is not None:
        args += ["--gpu-memory-utilization", f"{engine.gpu_memory_percent / 100:g}"]
    if engine.block_size is not None:
        args += ["--block-size", str(engine.block_size)]
    if engine.prefix_caching is False:
        args.append("--no-prefix-caching")
    if engine.max_num_batched_tokens is not None:
        args += ["--max-num-batched-tokens", str(engine.max_num_batched_tokens)]
    if engine.kv_cache_memory is not None:
        args += ["--kv-cache-memory", engine.kv_cache_memory + "B"]  # Mi -> MiB
    if engine.max_num_seqs is not None:
        args += ["--max-num-seqs", str(engine.max_num_seqs)]
    if engine.max_queue_length is not None:
        args += ["--max-queue", str(engine.max_queue_length)]
    return args


def _probes(startup_timeout_seconds: int, period_seconds: int) -> Manifest:
    def probe(path: str, **rule: int) -> Manifest:
        return {"httpGet": {"path": path, "port": names.PORT_NAME, "scheme": "HTTP"}, **rule}

    return {
        "startupProbe": probe(
            "/startupz",
            periodSeconds=period_seconds,
            timeoutSeconds=2,
            failureThreshold=math.ceil(startup_timeout_seconds / period_seconds),
        ),
        "livenessProbe": probe("/livez", periodSeconds=10, timeoutSeconds=5, failureThreshold=3),
        "readinessProbe": probe("/readyz", periodSeconds=period_seconds, timeoutSeconds=2, failureThreshold=2),
    }
