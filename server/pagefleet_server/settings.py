"""Every setting of the server, by subject. A default lives here once; flags, environment and docs read it from here.

`None` means "choose": the chosen value is computed at start, logged, and never written back here.
Bounds stand in the annotation, so that the command line and a decoded document are checked by the same numbers.
"""

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

MAX_SECONDS = 30 * 24 * 3600
"""Of any duration: a month. Longer is a slip of the finger, and much longer is none that every clock can hold."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Annotation of a text setting: the values it may have."""

    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, and how its weights are held."""

    model: str
    """Hugging Face directory or .gguf file, or a model of a hub: org/name, hf://org/name@revision, either with
    /file.gguf for one file. Required."""
    download_dir: str | None = None
    """Folder for models of a hub; replicas may share it. None: models in PAGEFLEET_CACHE_DIR, or ~/.cache/pagefleet."""
    served_model_name: Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]{1,256}$")] | None = None
    """Name in the API and in metrics labels, 1 to 256 characters, no control characters. None: the last part of the
    path without suffix."""
    device: Annotated[str, Choices(("auto", "cpu", "cuda"))] = "auto"
    """auto, cpu or cuda. auto: cuda when a device is there."""
    dtype: Annotated[str, Choices(("auto", "bfloat16", "float16", "float32"))] = "auto"
    """auto, bfloat16, float16 or float32. auto: the checkpoint's; on a CPU without AVX512-BF16 float32."""
    load_format: Annotated[str, Choices(("auto", "dummy"))] = "auto"
    """auto or dummy. dummy: random weights from the configuration alone, seed 0 (benchmarks, tests)."""
    quantization: Annotated[str, Choices(("none", "gguf", "q8_0", "q4_1"))] = "none"
    """none, gguf, q8_0 or q4_1: how the CPU kernels hold matrices. none: in the dtype. gguf: a .gguf file's as they are
    there, in small integers with their own scales: nothing is rounded, less is read. q8_0 and q4_1 round a checkpoint
    so at load, which changes its answers (docs/models-and-sampling.md). The fused decoder only."""
    executor: Annotated[str, Choices(("auto", "fused", "transformers"))] = "auto"
    """auto, fused or transformers. auto: the fused decoder for the architectures in its table, transformers' own code
    for all others; the log says which and why."""
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    """Processes, each with a device of its own on CUDA, that hold the model together, 1..64: a divisor of its query
    heads and MLP width. The fused decoder only. KV memory and threads: threads are shared out, KV memory counts for
    each."""
    max_model_len: Annotated[int, Meta(ge=2, le=2**31 - 1)] | None = None
    """Tokens of prompt plus output, >= 2: one of each. None: the model's own limit; always capped by what the blocks
    can hold."""
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Compute threads, >= 1, and no more than the machine has CPUs: they wait for each other many times in every step.
    None: the CPUs this process may use (affinity and cgroup), CPU device only."""
    pin_threads: bool = True
    """With as many threads as CPUs in the process's affinity, and the CPU kernels: the thread that runs the steps keeps
    the first CPU and all others the rest, so that they never wait for each other on one. Without effect otherwise."""
    chat_template: str | None = None
    """Jinja file for conversations, or the template itself. None: the model's own."""
    generation_config: bool = True
    """Requests that do not say get temperature, top_p, top_k, min_p and repetition_penalty of the model's
    generation_config.json; false: the API's defaults, 1.0 and off."""
    attention_backend: Annotated[str, Choices(("auto", "triton", "varlen", "flashinfer", "cpu", "reference"))] = "auto"
    """auto, triton, varlen, flashinfer, cpu or reference: whose attention and KV layout. auto: triton on CUDA, cpu on a
    CPU, and reference (plain torch) where they cannot run. varlen: FlashAttention as torch brings it, on CUDA with
    --block-size 256, 16-bit floats, no softcap or sinks. flashinfer: the package of that name, where it is installed,
    on CUDA, 16-bit floats, heads of 64, 128 or 256, no sinks. Both are checked against plain torch at the start. A
    named one that cannot serve refuses the start."""
    cuda_graphs: Annotated[str, Choices(("auto", "off"))] = "auto"
    """auto or off. auto: on CUDA the fused decoder's decode steps are captured at the start, for some numbers of rows
    and lengths, checked there against the uncaptured step, and replayed; the log says why where it is not done."""
    pooling: Annotated[str, Choices(("auto", "none", "last", "mean"))] = "auto"
    """auto, none, last or mean. last and mean make an embedding model of it: /v1/embeddings gives the last token's
    hidden state, or the mean over all. auto: what the checkpoint's modules.json says; without one, none."""
    deterministic: bool = False
    """Start only where a request's tokens and log-probabilities have the same bits whatever runs beside it. The CPU
    kernels promise that at no cost; a GPU, and a CPU without the built kernels, do not, and the start is refused."""
    trust_unverified_model: bool = False
    """Serve an architecture although nothing shows that its answers would be right (docs/models.md)."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The KV cache. num_kv_blocks wins over kv_cache_memory_bytes."""

    block_size: Annotated[int, Meta(ge=8, le=256)] = 16
    """Tokens per block, a power of two, 8..256."""
    kv_cache_memory_bytes: Annotated[int, Meta(ge=1024, le=2**50)] | None = None
    """Bytes for KV over all layers. None: gpu_memory_utilization; without it 1 GiB on CPU, or what is there."""
    num_kv_blocks: Annotated[int, Meta(ge=1, le=2**31 - 2)] | None = None
    """Usable blocks (the null block comes on top), >= 1. None: from the memory."""
    kv_cache_dtype: Annotated[str, Choices(("auto", "fp8", "fp8_e4m3"))] = "auto"
    """auto, fp8 or fp8_e4m3 (the same). auto: the model's dtype. fp8: half the bytes of 16-bit KV, so twice the tokens,
    with 3 bits of mantissa; on GPUs of compute capability 8.9 and later, else the start is refused."""
    prefix_caching: bool = True
    """Keep the KV of finished requests and share equal prefixes; false computes every prompt whole."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Part of the memory to use in all, (0, 1]: of the device; on a CPU of the machine or container, weights and
    activations included. None: 0.9 on CUDA; on a CPU the KV cache is sized by kv_cache_memory_bytes."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Bounds of one engine step."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=4096)] = 64
    """Running requests at most, 1..4096."""
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=2**20)] = 512
    """Tokens of one step at most, with memory kept for them; >= max_num_seqs: every running request can decode."""
    max_step_ms: Annotated[float, Meta(ge=0, le=3_600_000)] = 30.0
    """Prompts that enter beside running streams are cut so that a step takes about so long, by what earlier steps took.
    Lower: smoother streams, later first tokens. A step may always take twice as long as its decodes alone, and longer
    while there are fewer than four streams to one prompt: four times as long with as many prompts as streams, six
    times at most. 0: off."""
    speculative_tokens: Annotated[int, Meta(ge=0, le=16)] = 0
    """Prompt-lookup speculation: tokens guessed at most for a request in one step, from what followed its last tokens
    before, in prompt or output, and checked in that step; 0..16. The same tokens come, sooner where a text repeats
    itself or its prompt. 0: off."""
    speculative_max_num_seqs: Annotated[int, Meta(ge=1, le=4096)] = 4
    """Guess only while at most so many requests run, 1..4096, and none computes or awaits a prompt: rows cost time when
    the batch is full."""
    speculative_min_ngram: Annotated[int, Meta(ge=1, le=16)] = 2
    """Last tokens that must have stood there before, at least, for a guess; 1..16."""
    speculative_max_ngram: Annotated[int, Meta(ge=1, le=16)] = 4
    """Last tokens to look for first, 1..16, at least speculative_min_ngram: the longer, the better the guess."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """How the engine process watches itself and its parent."""

    stall_dump_seconds: Annotated[float, Meta(ge=2, le=MAX_SECONDS)] = 30.0
    """A step that takes longer has every thread's stack dumped to stderr, again each time so long. >= 2."""
    unread_timeout_seconds: Annotated[float, Meta(ge=1, le=MAX_SECONDS)] = 120.0
    """The engine ends when the API process takes no message for so long. >= 1."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """All that the engine process needs; sent to it as one JSON document."""

    model: ModelSettings
    cache: CacheSettings = field(default_factory=CacheSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    process: ProcessSettings = field(default_factory=ProcessSettings)


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The API process."""

    host: str = "127.0.0.1"
    """Listening address; the image sets 0.0.0.0."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0..65535; 0 picks a free one and logs it."""
    max_queue: Annotated[int, Meta(ge=0, le=2**20)] = 256
    """Accepted requests that wait (none of their tokens scheduled) at most; beyond it 503. >= 0."""
    max_queue_tokens: Annotated[int, Meta(ge=0, le=2**40)] = 2 * 1024 * 1024
    """Prompt tokens of waiting requests at most; beyond it 503. One request alone may always wait. 0: no bound."""
    queue_timeout_seconds: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] = 300.0
    """A request of which nothing has been computed after so long gets 503: others may be quicker. 0: no bound."""
    max_body_bytes: Annotated[int, Meta(ge=1024, le=2**30)] = 4 * 1024 * 1024
    """Request bodies beyond it get 413, 1 KiB..1 GiB: a body is held whole, and takes turns of the event loop by its
    size."""
    stall_seconds: Annotated[float, Meta(ge=0.1, le=MAX_SECONDS)] = 60.0
    """/livez fails when there is work and the engine said nothing for so long. >= 0.1; it speaks once a second when a
    step takes longer."""
    write_timeout_seconds: Annotated[float, Meta(ge=0.1, le=MAX_SECONDS)] = 30.0
    """A client that takes nothing from its stream for so long is dropped and its request aborted. >= 0.1."""
    stream_keep_alive_seconds: Annotated[float, Meta(ge=0.1, le=MAX_SECONDS)] = 15.0
    """A stream that was silent for so long gets a comment, so that no proxy takes a queue for a dead peer.
    >= 0.1."""
    read_timeout_seconds: Annotated[float, Meta(ge=0.1, le=MAX_SECONDS)] = 30.0
    """A request body must have arrived after so long; then 408. >= 0.1."""
    keep_alive_seconds: Annotated[float, Meta(ge=0.1, le=MAX_SECONDS)] = 75.0
    """A connection without a request is closed after so long; longer than what proxies in front use. >= 0.1."""
    request_timeout_seconds: Annotated[float, Meta(ge=0.01, le=MAX_SECONDS)] | None = None
    """An answer must be complete after so long, from arrival on; then 504, or an error event. A request may ask for
    less (`timeout`, or the header X-Request-Timeout). None: no limit."""
    api_key_file: str | None = None
    """File with one API key a line, read again when it changes. Without: everybody may ask."""
    cors_allow_origins: str = ""
    """Origins of web pages that may call the API from a browser, separated by commas, or *. Empty: none."""
    web_page: bool = True
    """Serve the built-in page at /: a chat and live figures. Off: / is 404 as any other path."""
    otlp_endpoint: Annotated[str, Meta(pattern=r"^https?://[^\s/?#]+$")] | None = None
    """Traces are sent to this OpenTelemetry collector (OTLP over HTTP), such as http://collector:4318. Needs the extra
    pagefleet[otel]. None: no traces."""
    root_path: Annotated[str, Meta(pattern=r"^(/[A-Za-z0-9._~-]+)*$")] = ""
    """Prefix that a proxy in front adds, such as /llm; routes are served with and without it."""
    drain_delay_seconds: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] = 10.0
    """After SIGTERM new requests are still served for so long: endpoints lag. >= 0."""
    drain_timeout_seconds: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] = 300.0
    """What runs or waits may take so long to finish; then streams end with an error event. >= 0."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The whole."""

    engine: EngineSettings
    http: HttpSettings = field(default_factory=HttpSettings)
