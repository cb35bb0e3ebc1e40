"""What a user asked for: an LLMDeployment as frozen values. Pure; parsing.py makes them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagefleet_operator import fields
from pagefleet_operator.names import ObjectKey

HUB = "hf://"
SHARED_ACCESS = "ReadWriteMany"
"""Access mode of a volume that pods on several nodes may write to."""


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """One limit of `behavior`: at most `value` pods or percent within `period_seconds`."""

    type: str
    """Pods or Percent."""
    value: int
    period_seconds: int


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """One direction of `behavior`, with the meaning of autoscaling/v2."""

    stabilization_window_seconds: int
    select_policy: str
    """Max, Min or Disabled."""
    policies: tuple[ScalingPolicy, ...]


DEFAULT_SCALE_UP = ScalingRules(
    stabilization_window_seconds=0,
    select_policy="Max",
    policies=(ScalingPolicy("Pods", 4, 15), ScalingPolicy("Percent", 100, 15)),
)
DEFAULT_SCALE_DOWN = ScalingRules(
    stabilization_window_seconds=300, select_policy="Max", policies=(ScalingPolicy("Percent", 100, 15),)
)


@dataclass(frozen=True, slots=True)
class Slo:
    """A latency objective. None: no objective of that kind; at least one is given."""

    percentile: int = fields.SLO_PERCENTILE.default_value
    time_to_first_token_ms: int | None = None
    inter_token_latency_ms: int | None = None


@dataclass(frozen=True, slots=True)
class AutoscalingSpec:
    """Bounds, targets and speed of scaling."""

    max_replicas: int
    min_replicas: int = fields.MIN_REPLICAS.default_value
    kv_block_occupancy_percent: int = fields.KV_BLOCK_OCCUPANCY_PERCENT.default_value
    queued_requests_per_replica: int = fields.QUEUED_REQUESTS_PER_REPLICA.default_value
    scale_up: ScalingRules = DEFAULT_SCALE_UP
    scale_down: ScalingRules = DEFAULT_SCALE_DOWN
    mode: str = "Managed"
    """Managed, or DryRun: decide and say so, but write nothing."""
    slo: Slo | None = None
    priority: int = fields.SCALING_PRIORITY.default_value
    """Who comes first when the namespace's budget of devices is short: the larger number."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Devices of one replica."""

    resource_name: str
    count: int = fields.ACCELERATOR_COUNT.default_value


@dataclass(frozen=True, slots=True)
class KeyRef:
    """A key of a Secret in the same namespace; the operator never reads it."""

    name: str
    key: str


@dataclass(frozen=True, slots=True)
class ModelCache:
    """Where a model of a hub is kept: in a claim that is there, or in one of ours."""

    claim: str | None = None
    """A PersistentVolumeClaim of the same namespace; None: one of ours."""
    size: str = ""
    storage_class: str | None = None
    """None: the cluster's default."""
    access_modes: tuple[str, ...] = (SHARED_ACCESS,)


@dataclass(frozen=True, slots=True)
class NetworkPolicySpec:
    """Who may reach the servers."""

    restricted: bool = False
    namespaces: tuple[str, ...] = ()
    """Whose pods may, beside those of the own namespace."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The server of each replica. None: the server's own default."""

    image: str | None = None
    """None: the operator's setting."""
    accelerator: Accelerator | None = None
    """None: CPU."""
    kv_cache_memory: str | None = None
    """A Kubernetes quantity in Mi or Gi."""
    gpu_memory_percent: int | None = None
    block_size: int | None = None
    """Tokens, a power of two."""
    prefix_caching: bool | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_queue_length: int | None = None
    args: tuple[str, ...] = ()
    env: tuple[Mapping[str, Any], ...] = ()
    """EnvVar objects, as they go into the container."""


@dataclass(frozen=True, slots=True)
class LLMDeploymentSpec:
    """The spec, complete with defaults and checked."""

    model_path: str
    """Path as the server's container sees it, or within the claim; hf://... for a model of a hub."""
    served_name: str
    model_claim: str | None = None
    """PersistentVolumeClaim that holds the model; None: the container's own file system."""
    revision: str | None = None
    """Of a hub's model; None: main."""
    token: KeyRef | None = None
    cache: ModelCache | None = None
    """None: every replica downloads for itself."""
    dtype: str | None = None
    max_model_len: int | None = None
    """Tokens."""
    api_keys: KeyRef | None = None
    pod_monitor: bool = True
    """Where the cluster has them."""
    network_policy: NetworkPolicySpec = field(default_factory=NetworkPolicySpec)
    engine: EngineSpec = field(default_factory=EngineSpec)
    replicas: int = fields.REPLICAS.default_value
    autoscaling: AutoscalingSpec | None = None
    startup_timeout_seconds: int = fields.STARTUP_TIMEOUT_SECONDS.default_value
    drain_delay_seconds: int = fields.DRAIN_DELAY_SECONDS.default_value
    drain_timeout_seconds: int = fields.DRAIN_TIMEOUT_SECONDS.default_value
    resources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    placement: str = "Pod"
    """Pod, or Sidecar: the server runs as a native sidecar beside the template's containers."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """The user's additions to the pod."""
    service_type: str = "ClusterIP"
    service_port: int = fields.SERVICE_PORT.default_value
    max_surge: int = fields.MAX_SURGE.default_value
    """Replicas that a rollout may add."""
    max_unavailable: int = fields.MAX_UNAVAILABLE.default_value
    """Replicas that a rollout may take away before new ones are ready."""
    budget_max_unavailable: int = fields.BUDGET_MAX_UNAVAILABLE.default_value
    """Replicas that may leave at once when nodes are drained."""

    @property
    def is_of_hub(self) -> bool:
        """Whether the server downloads its model."""
        return self.model_path.startswith(HUB)

    @property
    def most_pods(self) -> int:
        """Pods that may be there at once, those of a rollout included."""
        most = max(self.replicas, self.autoscaling.max_replicas if self.autoscaling else 0)
        return most + self.max_surge


@dataclass(frozen=True, slots=True)
class LLMDeployment:
    """One object: who it is, what it wants, what it last said."""

    key: ObjectKey
    uid: str
    resource_version: str
    """Precondition of writes: a late writer gets a 409."""
    generation: int
    spec: LLMDeploymentSpec
    status: Mapping[str, Any]
    """As last seen; the autoscaler's memory and transition times are read from here."""
