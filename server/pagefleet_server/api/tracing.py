"""OpenTelemetry traces of generation requests: one span for the request, below it queue, prefill and decode.

The library is an extra (`pagefleet[otel]`) and is imported only when traces are asked for. Names of attributes are
those of OpenTelemetry's semantic conventions for HTTP and generative AI.
"""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pagefleet_server.api.tracker import Timing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

NANOSECONDS = 10**9
FLUSH_MS = 2000
"""The last spans get so long to reach the collector when the server ends."""


class TracingUnavailableError(Exception):
    """Traces were asked for and cannot be made; the message says what to do."""


class Tracing:
    """Makes spans. Times come from `clock` and are told as `wall_clock` reads them."""

    def __init__(
        self, provider: "TracerProvider", *, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("pagefleet_server")
        self._propagator = TraceContextTextMapPropagator()
        self._clock = clock
        self._offset = wall_clock() - clock()

    def begin(self, method: str, route: str, headers: Mapping[str, str]) -> "RequestTrace":
        """A request has come; its `traceparent` and `tracestate` are continued, if there are any."""
        from opentelemetry.trace import SpanKind

        given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(
            f"{method} {route}",
            context=self._propagator.extract(given),
            kind=SpanKind.SERVER,
            start_time=self.to_nanoseconds(self._clock()),
            attributes={"http.request.method": method, "http.route": route},
        )
        return RequestTrace(self, span)

    def add(self, parent: "Span", name: str, begun: float, ended: float, attributes: Mapping[str, str | int]) -> None:
        """A finished child; times as `clock` gives them."""
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            name,
            context=set_span_in_context(parent),
            start_time=self.to_nanoseconds(begun),
            attributes=dict(attributes),
        )
        span.end(self.to_nanoseconds(max(begun, ended)))

    def now(self) -> float:
        """Clock seconds."""
        return self._clock()

    def to_nanoseconds(self, seconds: float) -> int:
        """Clock seconds -> since 1970."""
        return round((seconds + self._offset) * NANOSECONDS)

    def close(self) -> None:
        """Send what is left. Blocks for FLUSH_MS at most, and a moment."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()


class RequestTrace:
    """One HTTP request's span."""

    def __init__(self, tracing: Tracing, span: "Span") -> None:
        self._tracing = tracing
        self._span = span

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def traceparent(self) -> str:
        """This span in the header's form (W3C Trace Context)."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def on_end(self, timing: Timing, reason: str) -> None:
        """One of the request's outputs has ended: tell its phases, as far as it came."""
        if not self._span.is_recording():
            return
        now = self._tracing.now()
        tokens = {"gen_ai.usage.input_tokens": timing.num_prompt, "pagefleet.cached_tokens": timing.num_cached}
        phases: list[tuple[str, float, float | None, dict[str, str | int]]] = [
            ("queue", timing.arrival, timing.first_scheduled, {}),
        ]
        if timing.first_scheduled is not None:
            phases.append(("prefill", timing.first_scheduled, timing.first_token, {**tokens}))
        if timing.first_token is not None:
            generated: dict[str, str | int] = {
                "gen_ai.usage.output_tokens": timing.num_tokens,
                "gen_ai.response.finish_reason": reason,
                "pagefleet.num_preemptions": timing.num_preemptions,
            }
            if timing.num_draft_tokens:
                generated["pagefleet.num_draft_tokens"] = timing.num_draft_tokens
                generated["pagefleet.num_accepted_tokens"] = timing.num_accepted_tokens
            phases.append(("decode", timing.first_token, timing.last_token, generated))
        for name, begun, ended, attributes in phases:
            self._tracing.add(self._span, name, begun, now if ended is None else ended, attributes)

    def end(self, status: int, attributes: Mapping[str, str | int]) -> None:
        """The answer is sent, or the client is gone."""
        from opentelemetry.trace import StatusCode

        self._span.set_attributes({"http.response.status_code": status, **attributes})
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end(self._tracing.to_nanoseconds(self._tracing.now()))


def make_tracing(
    endpoint: str,
    *,
    model_name: str,
    version: str,
    clock: Callable[[], float],
    wall_clock: Callable[[], float] = time.time,
) -> Tracing:
    """Spans go to an OTLP/HTTP collector, `http://host:4318`. Raises TracingUnavailableError."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingUnavailableError("OpenTelemetry is not installed; pip install 'pagefleet[otel]'") from error
    resource = Resource.create(
        {"service.name": "pagefleet-server", "service.version": version, "gen_ai.request.model": model_name}
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=FLUSH_MS // 1000)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider, clock=clock, wall_clock=wall_clock)
