"""Every setting of the server, by subject. A default lives here once; flags, environment and docs read it from here.

`None` means "choose": the chosen value is computed at start, logged, and never written back here.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, and how its weights are held."""

    model: str
    """Hugging Face directory or .gguf file. Required."""
    served_model_name: str | None = None
    """Name in the API and in metrics labels. None: the last part of the path without suffix."""
    device: str = "auto"
    """auto, cpu or cuda. auto: cuda when a device is there."""
    dtype: str = "auto"
    """auto, bfloat16, float16 or float32. auto: the checkpoint's; on a CPU without AVX512-BF16 float32."""
    load_format: str = "auto"
    """auto or dummy. dummy: random weights from the configuration alone, seed 0 (benchmarks, tests)."""
    max_model_len: int | None = None
    """Tokens of prompt plus output, >= 1. None: the model's own limit; always capped by what the blocks can hold."""
    threads: int | None = None
    """Compute threads, >= 1. None: the CPUs this process may use (affinity and cgroup), CPU device only."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The KV cache. num_kv_blocks wins over kv_cache_memory_bytes."""

    block_size: int = 16
    """Tokens per block, a power of two, 8..256."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for KV over all layers. None: 1 GiB on CPU, gpu_memory_utilization on CUDA."""
    num_kv_blocks: int | None = None
    """Usable blocks (the null block comes on top), >= 1. None: from the memory."""
    gpu_memory_utilization: float = 0.9
    """Part of the device's memory to use in all, (0, 1]; CUDA only."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Bounds of one engine step."""

    max_num_seqs: int = 64
    """Running requests at most, 1..4096."""
    max_num_batched_tokens: int = 512
    """Tokens of one step at most; >= max_num_seqs so that every running request can decode."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """All that the engine process needs; sent to it as one JSON document."""

    model: ModelSettings
    cache: CacheSettings = field(default_factory=CacheSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The API process."""

    host: str = "127.0.0.1"
    """Listening address; the image sets 0.0.0.0."""
    port: int = 8000
    """0..65535; 0 picks a free one and logs it."""
    max_queue: int = 256
    """Accepted requests that wait (none of their tokens scheduled) at most; beyond it 503. >= 0."""
    max_body_bytes: int = 4 * 1024 * 1024
    """Request bodies beyond it get 413."""
    stall_seconds: float = 60.0
    """/livez fails when there is work and the engine said nothing for so long."""
    drain_delay_seconds: float = 10.0
    """After SIGTERM new requests are still served for so long: endpoints lag. >= 0."""
    drain_timeout_seconds: float = 300.0
    """What runs or waits may take so long to finish; then streams end with an error event. >= 0."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The whole."""

    engine: EngineSettings
    http: HttpSettings = field(default_factory=HttpSettings)
