"""Spans of a request, seen by an exporter in memory: their tree, times and token counts."""

from collections.abc import Mapping

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from pagefleet_server.api.tracing import RequestTrace, Tracing
from pagefleet_server.api.tracker import Group, Timing

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
EPOCH = 5000.0


class Clock:
    """Virtual time."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(clock: Clock, exporter: InMemorySpanExporter) -> Tracing:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider, clock=clock, wall_clock=lambda: EPOCH)


def begin(tracing: Tracing, headers: Mapping[str, str] | None = None) -> RequestTrace:
    return tracing.begin("POST", "/v1/completions", headers or {})


def spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def interval(span: ReadableSpan) -> tuple[float, float]:
    """Seconds after the request came."""
    assert span.start_time is not None and span.end_time is not None
    return span.start_time / 1e9 - EPOCH, span.end_time / 1e9 - EPOCH


def timing(**fields: float) -> Timing:
    made = Timing(arrival=100.5, num_prompt=20, max_tokens=9, group=Group(1), queued_tokens=0, num_cached=16)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_request_has_its_phases_below_it(tracing: Tracing, exporter: InMemorySpanExporter, clock: Clock) -> None:
    trace = begin(tracing)
    clock.now = 109.0
    trace.on_end(timing(first_scheduled=101.0, first_token=103.0, last_token=108.0, num_tokens=7), "length")
    trace.end(200, {"gen_ai.usage.input_tokens": 20})
    found = spans(exporter)
    root = found["POST /v1/completions"]
    assert interval(root) == (0, 9)
    assert {name: interval(span) for name, span in found.items() if span is not root} == {
        "queue": (0.5, 1),
        "prefill": (1, 3),
        "decode": (3, 8),
    }
    for span in found.values():
        assert span is root or (span.parent is not None and span.parent.span_id == root.context.span_id)
    attributes = {name: dict(span.attributes or {}) for name, span in found.items()}
    assert attributes["prefill"] == {"gen_ai.usage.input_tokens": 20, "pagefleet.cached_tokens": 16}
    assert attributes["decode"]["gen_ai.usage.output_tokens"] == 7
    assert attributes["decode"]["gen_ai.response.finish_reason"] == "length"
    assert attributes["POST /v1/completions"]["http.response.status_code"] == 200
    assert attributes["POST /v1/completions"]["gen_ai.usage.input_tokens"] == 20


@pytest.mark.parametrize(
    ("come_to", "want"),
    [
        ({}, {"queue"}),
        ({"first_scheduled": 101.0}, {"queue", "prefill"}),
        ({"first_scheduled": 101.0, "first_token": 102.0, "last_token": 102.0}, {"queue", "prefill", "decode"}),
    ],
)
def test_an_aborted_request_has_the_phases_it_came_to(
    tracing: Tracing, exporter: InMemorySpanExporter, clock: Clock, come_to: dict[str, float], want: set[str]
) -> None:
    trace = begin(tracing)
    clock.now = 110.0
    trace.on_end(timing(**come_to), "abort")
    assert set(spans(exporter)) == want


def test_a_callers_trace_is_continued_and_told(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    trace = begin(tracing, {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "vendor=1"})
    assert trace.trace_id == TRACE_ID
    version, trace_id, span_id, flags = trace.traceparent.split("-")
    assert (version, trace_id, flags) == ("00", TRACE_ID, "01") and span_id != PARENT_ID
    trace.end(503, {})
    (root,) = exporter.get_finished_spans()
    assert root.parent is not None and f"{root.parent.span_id:016x}" == PARENT_ID
    assert root.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{TRACE_ID}-{PARENT_ID}", f"00-{'0' * 32}-{PARENT_ID}-01", "é"])
def test_a_header_that_is_none_begins_a_new_trace(tracing: Tracing, header: str) -> None:
    assert begin(tracing, {"traceparent": header}).trace_id not in {TRACE_ID, "0" * 32}


def test_a_caller_that_does_not_sample_gets_no_spans(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    trace = begin(tracing, {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"})
    trace.on_end(timing(first_scheduled=101.0), "abort")
    trace.end(200, {})
    assert exporter.get_finished_spans() == ()
    assert trace.traceparent.endswith("-00")
