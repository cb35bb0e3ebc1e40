"""Names, labels and buckets of the metrics, and that they are true at every moment; docs/metrics.md lists them all."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagefleet_server.api.errors import REFUSAL_REASONS
from pagefleet_server.api.gauges import GaugeView
from pagefleet_server.api.load_report import report_load
from pagefleet_server.api.metrics import Metrics
from pagefleet_server.api.service import Service
from pagefleet_server.api.tracker import Tracker
from pagefleet_server.client.engine_client import EngineClient
from pagefleet_server.settings import EngineSettings, ModelSettings, ServerSettings
from pagefleet_server.wire import Gauges, Ready, RequestOutput, StepDone

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
LATENCY = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
FIRST_TOKEN = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
TOKEN_GAP = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
ITERATION = "1 2 4 8 16 32 64 128 256 512 1024 2048 4096 8192 16384"
TOKENS = "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000 200000 500000"
WANT_GAUGES = {
    "vllm:num_requests_running": [],
    "vllm:num_requests_waiting": [],
    "vllm:num_requests_waiting_by_reason": ["reason"],
    "vllm:kv_cache_usage_perc": [],
    "vllm:engine_sleep_state": ["sleep_state"],
    "pagefleet_prompt_tokens_waiting": [],
    "pagefleet_kv_blocks": ["state"],
    "pagefleet_kv_blocks_total": [],
    "pagefleet_kv_blocks_waiting": [],
    "pagefleet_requests_oldest_waiting_seconds": [],
    "pagefleet_engine_last_step_age_seconds": [],
    "pagefleet_engine_start_seconds": ["phase"],
    "pagefleet_draining": [],
    "pagefleet_backend_info": ["attention", "linear"],
}
WANT_COUNTERS = {
    "vllm:num_preemptions": [],
    "vllm:prefix_cache_queries": [],
    "vllm:prefix_cache_hits": [],
    "vllm:spec_decode_num_drafts": [],
    "vllm:spec_decode_num_draft_tokens": [],
    "vllm:spec_decode_num_accepted_tokens": [],
    "vllm:prompt_tokens": [],
    "vllm:generation_tokens": [],
    "vllm:prompt_tokens_cached": [],
    "vllm:prompt_tokens_by_source": ["source"],
    "vllm:request_success": ["finished_reason"],
    "pagefleet_requests_rejected": ["reason"],
}
WANT_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": FIRST_TOKEN,
    "vllm:inter_token_latency_seconds": TOKEN_GAP,
    "vllm:e2e_request_latency_seconds": LATENCY,
    "vllm:request_queue_time_seconds": LATENCY,
    "vllm:request_prefill_time_seconds": LATENCY,
    "vllm:request_decode_time_seconds": LATENCY,
    "vllm:request_inference_time_seconds": LATENCY,
    "vllm:request_time_per_output_token_seconds": TOKEN_GAP,
    "vllm:request_prompt_tokens": TOKENS,
    "vllm:request_generation_tokens": TOKENS,
    "vllm:request_max_num_generation_tokens": TOKENS,
    "vllm:request_params_max_tokens": TOKENS,
    "vllm:request_prefill_kv_computed_tokens": TOKENS,
    "vllm:request_params_n": "1 2 5 10 20",
    "vllm:request_num_preemptions": "1 2 3 4 5 10 20",
    "vllm:iteration_tokens_total": ITERATION,
    "pagefleet_engine_step_seconds": None,
}


class Clock:
    """Virtual time."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def sample(metrics: Metrics, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(metrics.render().decode()):
        for item in family.samples:
            if item.name == name and labels.items() <= item.labels.items():
                return float(item.value)
    raise KeyError(name)


def gauges(**changes: int | float | None) -> Gauges:
    idle: dict[str, Any] = dict.fromkeys(Gauges.__struct_fields__, 0) | {
        "oldest_waiting_arrival": None,
        "num_accepted_by_place": [],
    }
    return msgspec.convert({**idle, **changes}, Gauges)


def step(time: float, *outputs: RequestOutput, **state: int | float | None) -> StepDone:
    return StepDone(gauges=gauges(**state), outputs=list(outputs), time=time, step_seconds=0.01, step_tokens=3)


def test_every_family_is_there_at_zero_from_the_start() -> None:
    families = {f.name: f for f in text_string_to_metric_families(Metrics("m", GaugeView).render().decode())}
    for kind, want in (("gauge", WANT_GAUGES), ("counter", WANT_COUNTERS)):
        for name, own_labels in want.items():
            assert families[name].type == kind, name
            for item in families[name].samples:
                assert set(item.labels) == {"model_name", "engine", *own_labels}, name
                assert item.labels["engine"] == "0" and item.labels["model_name"] == "m"
                is_one = name.endswith("_info") or item.labels.get("sleep_state") == "awake"
                assert item.value == is_one, name
    for name, buckets in WANT_HISTOGRAMS.items():
        assert families[name].type == "histogram", name
        edges = [item.labels["le"] for item in families[name].samples if item.name.endswith("_bucket")]
        assert all(item.value == 0 for item in families[name].samples)
        if buckets is not None:
            assert [float(edge) for edge in edges] == [float(edge) for edge in [*buckets.split(), "inf"]], name


def test_label_values_are_all_there_from_the_start() -> None:
    metrics = Metrics("m", GaugeView)
    for reason in ("stop", "length", "abort", "error", "repetition"):
        assert sample(metrics, "vllm:request_success_total", finished_reason=reason) == 0
    for reason in REFUSAL_REASONS:
        assert sample(metrics, "pagefleet_requests_rejected_total", reason=reason) == 0
    for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
        assert sample(metrics, "vllm:admission_rejections_total", reason=reason) == 0
    for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
        assert sample(metrics, "vllm:prompt_tokens_by_source_total", source=source) == 0
    for state in ("free", "cached", "used"):
        assert sample(metrics, "pagefleet_kv_blocks", state=state) == 0
    for phase in ("load_weights", "allocate_kv", "warm_up"):
        assert sample(metrics, "pagefleet_engine_start_seconds", phase=phase) == 0


def test_the_cache_configuration_has_no_model_name() -> None:
    """The Gateway API's endpoint picker reads block_size and num_gpu_blocks from its labels."""
    metrics = Metrics("m", lambda: GaugeView(block_size=16, blocks_total=812))
    assert 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="812"} 1.0' in metrics.render().decode()


def test_usage_counts_evictable_blocks_as_free() -> None:
    """Otherwise a full prefix cache would keep every replica for ever."""
    view = GaugeView(blocks_free=10, blocks_cached=50, blocks_used=40, blocks_total=100)
    assert sample(Metrics("m", lambda: view), "vllm:kv_cache_usage_perc") == 0.4


async def test_blocks_add_up_between_the_engines_first_words() -> None:
    """It says how many there are before it says what they are used for."""
    settings = ServerSettings(EngineSettings(ModelSettings("m")))
    client = EngineClient(settings.engine)
    client.ready = Ready(16, 812, 8192, [2], 100, "cpu", {})
    service = Service(settings, model_name="m", client=client, clock=lambda: 0.0)
    gauges = Gauges(1, 0, 500, 12, 300, 812, 0, None, 1, 0, 0, 0)
    for word in (None, gauges):
        service.tracker.gauges = word
        view = service.view()
        assert view.blocks_free + view.blocks_cached + view.blocks_used == view.blocks_total
    assert view.blocks_total == 812


def test_families_can_be_picked_by_family_or_sample_name() -> None:
    metrics = Metrics("m", GaugeView)
    text = metrics.render(["vllm:num_requests_running", "vllm:request_success_total", "nothing"]).decode()
    assert set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)) == {
        "vllm:num_requests_running",
        "vllm:request_success_total",
    }
    assert metrics.render(["nothing"]) == b""


def test_guesses_are_counted_under_vllms_names() -> None:
    metrics = Metrics("m", lambda: GaugeView(drafts=7, draft_tokens=20, accepted_by_place=(5, 3, 0)))
    assert sample(metrics, "vllm:spec_decode_num_drafts_total") == 7
    assert sample(metrics, "vllm:spec_decode_num_draft_tokens_total") == 20
    assert sample(metrics, "vllm:spec_decode_num_accepted_tokens_total") == 8
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [sample(metrics, name, position=place) for place in "012"] == [5, 3, 0]


def test_the_docs_list_exactly_the_families_that_there_are() -> None:
    text = Metrics("m", GaugeView).render().decode()
    there = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert set(re.findall(r"^\| `([a-z0-9_:]+)", DOCS.read_text(), re.MULTILINE)) == there


VLLM = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc num_preemptions_total
prefix_cache_queries_total prefix_cache_hits_total external_prefix_cache_queries_total external_prefix_cache_hits_total
prompt_tokens_total generation_tokens_total prompt_tokens_by_source_total prompt_tokens_cached_total
prompt_tokens_cached_by_source_total request_success_total admission_rejections_total time_to_first_token_seconds
inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds
request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
request_prompt_tokens request_generation_tokens request_max_num_generation_tokens request_params_max_tokens
request_prefill_kv_computed_tokens request_params_n request_num_preemptions iteration_tokens_total engine_sleep_state
cache_config_info lora_requests_info mm_cache_queries_total mm_cache_hits_total kv_block_lifetime_seconds
kv_block_idle_before_evict_seconds kv_block_reuse_gap_seconds num_requests_kv_fetch_by_stage
spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
spec_decode_num_accepted_tokens_per_pos_total
"""
"""Families of vLLM 0.33 (vllm/v1/metrics), without its prefix."""


@pytest.mark.parametrize("name", VLLM.split())
def test_what_vllm_exports_is_here_or_the_docs_say_why_not(name: str) -> None:
    there = set(re.findall(r"^# TYPE vllm:(\S+)", Metrics("m", GaugeView).render().decode(), re.MULTILINE))
    _, _, missing = DOCS.read_text().partition("## What vLLM has and this server has not")
    missing, _, _ = missing.partition("`vllm:cache_config_info`")
    patterns = [re.escape(found).replace(r"\*", ".*") for found in re.findall(r"`vllm:([a-z_*]+)`", missing)]
    is_missing = any(re.fullmatch(f"{pattern}(_total)?", name) for pattern in patterns)
    assert (name in there) is not is_missing, name


def test_the_load_is_reported_in_both_forms_of_the_header() -> None:
    view = GaugeView(waiting=3, blocks_used=1, blocks_total=4)
    want = "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3"
    assert report_load("text", view) == want
    assert report_load("JSON", view) == (
        'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}}'
    )
    assert report_load("BIN", view) is None


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tracker(clock: Clock) -> Tracker:
    return Tracker(Metrics("m", GaugeView), clock=clock)


def sent(tracker: Tracker, request_id: str, *, num_prompt: int = 20) -> None:
    key = object()
    arrival = tracker.arrive(key, 1)
    tracker.sent([(request_id, 9)], arrival=arrival, num_prompt=num_prompt, num_blocks=2)
    tracker.left_door(key)


def take(tracker: Tracker, step_done: StepDone) -> None:
    """As the client hands a message out."""
    tracker.on_step(step_done)
    for output in step_done.outputs:
        tracker.on_output(output, step_done.time)


def test_a_request_waits_from_acceptance_until_the_engine_runs_it(tracker: Tracker, clock: Clock) -> None:
    key = object()
    arrival = tracker.arrive(key, 2)
    assert (tracker.num_waiting, tracker.blocks_waiting) == (2, 2), "being tokenised"
    clock.now += 1
    for request_id in ("a", "b"):
        tracker.sent([(request_id, 9)], arrival=arrival, num_prompt=33, num_blocks=3)
    tracker.left_door(key)
    assert (tracker.num_waiting, tracker.blocks_waiting, tracker.oldest_waiting_seconds) == (2, 6, 1)
    take(tracker, step(101, num_added=1, num_running=1))
    assert (tracker.num_waiting, tracker.blocks_waiting) == (1, 3), "one is read and runs"
    take(
        tracker,
        step(102, num_added=2, num_running=1, num_waiting=1, blocks_waiting=3, oldest_waiting_arrival=100.0),
    )
    assert (tracker.num_waiting, tracker.blocks_waiting, tracker.oldest_waiting_seconds) == (1, 3, 1)
    take(tracker, step(103, num_added=2, num_running=2))
    assert (tracker.num_waiting, tracker.blocks_waiting, tracker.oldest_waiting_seconds) == (0, 0, 0)


def test_times_are_measured_from_arrival_on(clock: Clock) -> None:
    metrics = Metrics("m", GaugeView)
    tracker = Tracker(metrics, clock=clock)
    sent(tracker, "a")
    take(tracker, step(103, RequestOutput("a", [5], first_scheduled_time=101.0)))
    take(tracker, step(104, RequestOutput("a", [5])))
    take(tracker, step(106, RequestOutput("a", [5], "length")))
    for name, want in (
        ("time_to_first_token", 3),
        ("request_queue_time", 1),
        ("request_prefill_time", 2),
        ("request_decode_time", 3),
        ("request_inference_time", 5),
        ("e2e_request_latency", 6),
        ("inter_token_latency", 3),
        ("request_time_per_output_token", 1.5),
    ):
        assert sample(metrics, f"vllm:{name}_seconds_sum") == want, name
    assert sample(metrics, "vllm:inter_token_latency_seconds_count") == 2
    assert sample(metrics, "vllm:prompt_tokens_total") == 20
    assert sample(metrics, "vllm:generation_tokens_total") == 3
    assert sample(metrics, "vllm:request_success_total", finished_reason="length") == 1


@pytest.mark.parametrize("reason", ["stop", "abort", "error"])
def test_a_request_that_the_api_ends_is_counted_once(clock: Clock, reason: str) -> None:
    metrics = Metrics("m", GaugeView)
    tracker = Tracker(metrics, clock=clock)
    sent(tracker, "a")
    take(tracker, step(103, RequestOutput("a", [5])))
    tracker.ended("a", reason)
    tracker.ended("a", reason)
    take(tracker, step(104, RequestOutput("a", [5], "length")))
    assert sample(metrics, "vllm:request_success_total", finished_reason=reason) == 1
    assert sample(metrics, "vllm:request_success_total", finished_reason="length") == 0
    assert sample(metrics, "vllm:generation_tokens_total") == 1


def test_prompt_tokens_wait_until_a_step_computes_the_first_of_them(tracker: Tracker, clock: Clock) -> None:
    """A long prompt runs for many steps before it has an output; it must not count as waiting meanwhile."""
    key = object()
    arrival = tracker.arrive(key, 2)
    tracker.sent([("a", 9), ("b", 9)], arrival=arrival, num_prompt=300, num_blocks=3)
    tracker.left_door(key)
    sent(tracker, "c", num_prompt=40)
    assert tracker.num_queued_tokens == 340, "n outputs share one prompt"
    assert not tracker.has_begun("a")
    step_done = step(103, num_added=3, num_running=1, num_waiting=2)
    take(tracker, msgspec.structs.replace(step_done, prefilling=["a", "gone"]))
    assert (tracker.num_queued_tokens, tracker.has_begun("a"), tracker.has_begun("c")) == (40, True, False)
    tracker.ended("c", "abort")
    tracker.ended("a", "abort")
    assert tracker.num_queued_tokens == 0 and not tracker.has_begun("a")


def test_finished_requests_are_measured_once_and_groups_by_their_longest(clock: Clock) -> None:
    metrics = Metrics("m", GaugeView)
    tracker = Tracker(metrics, clock=clock)
    tracker.sent([("a", 7), ("b", 7)], arrival=100.0, num_prompt=20, num_blocks=2)
    first = RequestOutput("a", [5], first_scheduled_time=101.0, num_cached_tokens=16, num_preemptions=1)
    take(tracker, step(103, first, RequestOutput("b", [5], "stop", first_scheduled_time=101.0)))
    take(tracker, step(104, RequestOutput("a", [5], "length", num_cached_tokens=16, num_preemptions=1)))
    for name, want in (
        ("request_prompt_tokens", 40),
        ("request_generation_tokens", 3),
        ("request_max_num_generation_tokens", 2),
        ("request_params_max_tokens", 14),
        ("request_prefill_kv_computed_tokens", 24),
        ("request_params_n", 2),
        ("request_num_preemptions", 1),
        ("prompt_tokens_cached", 16),
    ):
        suffix = "total" if name == "prompt_tokens_cached" else "sum"
        assert sample(metrics, f"vllm:{name}_{suffix}") == want, name
    assert sample(metrics, "vllm:prompt_tokens_by_source_total", source="local_compute") == 24
    assert sample(metrics, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 16
    assert sample(metrics, "vllm:request_params_n_count") == 1


def test_nothing_is_left_of_a_dead_engine(tracker: Tracker) -> None:
    sent(tracker, "a")
    take(tracker, step(103, num_added=0, num_running=4, num_waiting=2))
    tracker.on_death()
    assert (tracker.num_waiting, tracker.load.running) == (0, 0)


def test_idle_messages_are_no_steps(clock: Clock) -> None:
    metrics = Metrics("m", GaugeView)
    take(Tracker(metrics, clock=clock), StepDone(gauges=gauges(), outputs=[], time=1.0))
    assert sample(metrics, "pagefleet_engine_step_seconds_count") == 0
    assert sample(metrics, "vllm:iteration_tokens_total_count") == 0
