"""The registry: counters and histograms that events move, beside the gauges of gauges.py."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric

from pagefleet_server.api import metric_names as names
from pagefleet_server.api.errors import REFUSAL_REASONS
from pagefleet_server.api.gauges import GaugeCollector, GaugeView


class Metrics:
    """Every family exists, at zero, from the start."""

    def __init__(self, model_name: str, view: Callable[[], GaugeView]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library gives it no types
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._registry.register(GaugeCollector(model_name, view))
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that got a token.")
        self._cached_tokens = self._counter("vllm:prompt_tokens_cached", "Of these, tokens found in the prefix cache.")
        self._sources = self._counter_by("vllm:prompt_tokens_by_source", "Prompt tokens by origin.", "source")
        for source in names.PROMPT_SOURCES:
            self._sources.labels(**self._labels, source=source)
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._success = self._counter_by("vllm:request_success", "Requests ended, by reason.", "finished_reason")
        self._rejected = self._counter_by("pagefleet_requests_rejected", "Requests refused at the door.", "reason")
        self._not_admitted = Counter(
            "vllm:admission_rejections",
            "Requests refused because too much waits.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        for reason in names.FINISH_REASONS:
            self.finished(reason, 0)
        for reason in REFUSAL_REASONS:
            self.rejected(reason, 0)
        histogram, latency = self._histogram, names.LATENCY_BUCKETS
        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", names.FIRST_TOKEN_BUCKETS
        )
        self.token_gap = histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a request.", names.TOKEN_GAP_BUCKETS
        )
        self.mean_token_gap = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between the tokens of a finished request.",
            names.TOKEN_GAP_BUCKETS,
        )
        self.end_to_end = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", latency)
        self.queue_time = histogram("vllm:request_queue_time_seconds", "From arrival to the first step.", latency)
        self.prefill_time = histogram(
            "vllm:request_prefill_time_seconds", "From the first step to the first token.", latency
        )
        self.decode_time = histogram("vllm:request_decode_time_seconds", "From the first token to the last.", latency)
        self.inference_time = histogram(
            "vllm:request_inference_time_seconds", "From the first step to the last token.", latency
        )
        self.num_prompt = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a finished request.", names.TOKEN_BUCKETS
        )
        self.num_generated = histogram(
            "vllm:request_generation_tokens", "Generated tokens of a finished request.", names.TOKEN_BUCKETS
        )
        self.longest_generated = histogram(
            "vllm:request_max_num_generation_tokens", "Generated tokens of the longest of n.", names.TOKEN_BUCKETS
        )
        self.params_max_tokens = histogram(
            "vllm:request_params_max_tokens", "max_tokens of a finished request.", names.TOKEN_BUCKETS
        )
        self.num_computed = histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens that were not cached.", names.TOKEN_BUCKETS
        )
        self.params_n = histogram("vllm:request_params_n", "Outputs asked for of one prompt.", names.N_BUCKETS)
        self.num_preemptions = histogram(
            "vllm:request_num_preemptions", "How often a finished request was preempted.", names.PREEMPTION_BUCKETS
        )
        self.iteration_tokens = histogram("vllm:iteration_tokens_total", "Tokens of a step.", names.ITERATION_BUCKETS)
        self.step_seconds = histogram("pagefleet_engine_step_seconds", "What a step takes.", names.STEP_BUCKETS)

    def finished(self, reason: str, amount: int = 1) -> None:
        """A request ended."""
        self._success.labels(**self._labels, finished_reason=reason).inc(amount)

    def prompt(self, num_tokens: int, num_cached: int) -> None:
        """A request got its first token; so many of its prompt's tokens were cached."""
        self._prompt_tokens.inc(num_tokens)
        self._cached_tokens.inc(num_cached)
        self._sources.labels(**self._labels, source="local_cache_hit").inc(num_cached)
        self._sources.labels(**self._labels, source="local_compute").inc(num_tokens - num_cached)

    def rejected(self, reason: str, amount: int = 1) -> None:
        """Requests were refused."""
        self._rejected.labels(**self._labels, reason=reason).inc(amount)
        if reason in names.ADMISSION_REASONS:
            name = names.ADMISSION_REASONS[reason]
            self._not_admitted.labels(model_name=self._labels["model_name"], reason=name).inc(amount)

    def render(self, wanted: Sequence[str] = ()) -> bytes:
        """Prometheus text. `wanted` holds family or sample names; empty means all."""
        if not wanted:
            return generate_latest(self._registry)
        return generate_latest(_Selection(self._registry, frozenset(wanted)))

    def _counter(self, name: str, doc: str) -> Counter:
        return Counter(name, doc, list(self._labels), registry=self._registry).labels(**self._labels)

    def _counter_by(self, name: str, doc: str, label: str) -> Counter:
        return Counter(name, doc, [*self._labels, label], registry=self._registry)

    def _histogram(self, name: str, doc: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(name, doc, list(self._labels), registry=self._registry, buckets=buckets)
        return family.labels(**self._labels)


class _Selection(CollectorRegistry):
    """Some families of another registry."""

    def __init__(self, registry: CollectorRegistry, wanted: frozenset[str]) -> None:
        super().__init__()
        self._whole = registry
        self._wanted = wanted

    def collect(self) -> Iterator[Metric]:
        """Those that are named, or have a sample that is."""
        for family in self._whole.collect():
            if family.name in self._wanted or any(sample.name in self._wanted for sample in family.samples):
                yield family
