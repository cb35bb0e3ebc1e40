"""Gauges, and counters that the engine keeps: computed from its last message at each scrape, so none can be stale."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pagefleet_server.api import metric_names as names
from pagefleet_server.wire import Gauges


@dataclass(frozen=True, slots=True)
class GaugeView:
    """All that gauges show, taken at one moment. Blocks: free + cached + used = total."""

    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    blocks_waiting: int = 0
    tokens_waiting: int = 0
    oldest_waiting_seconds: float = 0.0
    report_age_seconds: float = 0.0
    draining: bool = False
    preemptions: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_by_place: tuple[int, ...] = ()
    block_size: int = 0
    attention_backend: str = ""
    linear_backend: str = ""
    start_seconds: dict[str, float] = field(default_factory=dict)
    download_done_bytes: int = 0
    download_total_bytes: int = 0
    """0: no download, or its size is not known yet."""
    load_done_bytes: int = 0
    load_total_bytes: int = 0
    """0: the load has not told yet."""

    def with_engine(self, gauges: Gauges) -> "GaugeView":
        """Completed by what the engine said last."""
        return replace(
            self,
            running=gauges.num_running,
            blocks_free=gauges.blocks_free,
            blocks_cached=gauges.blocks_cached,
            blocks_used=gauges.blocks_used,
            blocks_total=gauges.blocks_total,
            preemptions=gauges.num_preemptions,
            prefix_queries_tokens=gauges.prefix_queries_tokens,
            prefix_hits_tokens=gauges.prefix_hits_tokens,
            drafts=gauges.num_drafts,
            draft_tokens=gauges.num_draft_tokens,
            accepted_by_place=tuple(gauges.num_accepted_by_place),
        )

    @property
    def usage(self) -> float:
        """0..1; evictable cached blocks count as free."""
        return self.blocks_used / self.blocks_total if self.blocks_total else 0.0


class GaugeCollector(Collector):
    """Asks for a GaugeView at each scrape, so that no gauge can be stale."""

    def __init__(self, model_name: str, view: Callable[[], GaugeView]) -> None:
        self._model_name = model_name
        self._view = view

    def collect(self) -> Iterable[Metric]:
        """Every gauge family."""
        view = self._view()
        model = {"model_name": self._model_name, "engine": "0"}

        def gauge(name: str, doc: str, *samples: tuple[dict[str, str], float]) -> Metric:
            family = GaugeMetricFamily(name, doc, labels=list(samples[0][0]))
            for labels, value in samples:
                family.add_metric(list(labels.values()), value)
            return family

        blocks = {"free": view.blocks_free, "cached": view.blocks_cached, "used": view.blocks_used}
        phases = dict.fromkeys(names.START_PHASES, 0.0) | view.start_seconds
        config = {"block_size": str(view.block_size), "num_gpu_blocks": str(view.blocks_total), "engine": "0"}
        backends = {"attention": view.attention_backend, "linear": view.linear_backend}
        yield gauge("vllm:num_requests_running", "Requests in the engine's batch.", (model, view.running))
        yield gauge("vllm:num_requests_waiting", "Accepted requests that do not run yet.", (model, view.waiting))
        reasons = dict.fromkeys(names.WAITING_REASONS, 0) | {"capacity": view.waiting}
        yield gauge(
            "vllm:num_requests_waiting_by_reason",
            "The same by reason; nothing is ever deferred here.",
            *(({**model, "reason": reason}, count) for reason, count in reasons.items()),
        )
        states = dict.fromkeys(names.SLEEP_STATES, 0) | {"awake": 1}
        yield gauge(
            "vllm:engine_sleep_state",
            "This engine is always awake.",
            *(({**model, "sleep_state": state}, value) for state, value in states.items()),
        )
        yield gauge("vllm:kv_cache_usage_perc", "KV-cache blocks in use; 1 is all of them.", (model, view.usage))
        yield gauge("vllm:cache_config_info", "How the KV cache is laid out.", (config, 1))
        yield gauge(
            "pagefleet_kv_blocks",
            "KV-cache blocks by state.",
            *(({**model, "state": state}, blocks[state]) for state in names.BLOCK_STATES),
        )
        yield gauge(
            "pagefleet_kv_blocks_total", "KV-cache blocks, the null block excluded.", (model, view.blocks_total)
        )
        yield gauge(
            "pagefleet_kv_blocks_waiting", "New blocks that waiting requests will need.", (model, view.blocks_waiting)
        )
        yield gauge(
            "pagefleet_prompt_tokens_waiting", "Prompt tokens of requests in the queue.", (model, view.tokens_waiting)
        )
        yield gauge(
            "pagefleet_requests_oldest_waiting_seconds",
            "How long the oldest waiting request has waited; 0 when none waits.",
            (model, view.oldest_waiting_seconds),
        )
        yield gauge(
            "pagefleet_engine_last_step_age_seconds",
            "Since the engine last reported: a step, or once a second while idle.",
            (model, view.report_age_seconds),
        )
        yield gauge(
            "pagefleet_engine_start_seconds",
            "What the phases of the start-up took; 0 until they are over.",
            *(({**model, "phase": phase}, seconds) for phase, seconds in phases.items()),
        )
        yield gauge(
            "pagefleet_model_download_bytes", "Bytes of the model that are here.", (model, view.download_done_bytes)
        )
        yield gauge(
            "pagefleet_model_download_total_bytes",
            "Bytes of the model; 0 without a download or before its size is known.",
            (model, view.download_total_bytes),
        )
        yield gauge(
            "pagefleet_model_load_bytes", "Bytes of the weights that are loaded.", (model, view.load_done_bytes)
        )
        yield gauge(
            "pagefleet_model_load_total_bytes",
            "Bytes of all weights; 0 in the first seconds of a load.",
            (model, view.load_total_bytes),
        )
        yield gauge("pagefleet_draining", "1 from SIGTERM or /drain on.", (model, int(view.draining)))
        for name, doc, value in (
            ("vllm:num_preemptions", "Requests pushed out of the batch to be recomputed.", view.preemptions),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", view.prefix_queries_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", view.prefix_hits_tokens),
            ("vllm:spec_decode_num_drafts", "Times that a request got draft tokens in a step.", view.drafts),
            ("vllm:spec_decode_num_draft_tokens", "Draft tokens that were checked.", view.draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were right.", sum(view.accepted_by_place)),
        ):
            counter = CounterMetricFamily(name, doc, labels=list(model))
            counter.add_metric(list(model.values()), value)
            yield counter
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Right draft tokens by their place in the draft; empty without speculation.",
            labels=[*model, "position"],
        )
        for place, count in enumerate(view.accepted_by_place):
            places.add_metric([*model.values(), str(place)], count)
        yield places
        yield gauge("pagefleet_backend_info", "Kernels in use; empty until the engine is ready.", (backends | model, 1))
