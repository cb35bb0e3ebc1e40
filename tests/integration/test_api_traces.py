"""Traces of a real server process, as an OTLP collector receives them."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from support.api_server import memory_server

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP/HTTP receiver."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.endpoint = ""

    async def receive(self, request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest()
        body = await request.read()
        message.ParseFromString(body)
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return web.Response(content_type="application/x-protobuf")


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.receive)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield collector
    await runner.cleanup()


async def test_a_traced_request_arrives_at_the_collector(tmp_path: Path, collector: Collector) -> None:
    async with memory_server(tmp_path, "fine", "--otlp-endpoint", collector.endpoint) as talk:
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        body = {"prompt": "abc", "max_tokens": 5, "ignore_eos": True, "n": 2}
        async with talk.session.post("/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
            assert response.headers["traceparent"].startswith(f"00-{TRACE_ID}-")
        async with talk.session.get("/livez") as response:
            assert "traceparent" not in response.headers, "probes are not traced"
        assert f'"trace_id": "{TRACE_ID}"' in talk.server.log
        talk.server.signal(signal.SIGTERM)
        assert await asyncio.to_thread(talk.server.wait_exit) == 0
    found = [span for span in collector.spans if span.trace_id.hex() == TRACE_ID]
    assert sorted(span.name for span in found) == [
        *("POST /v1/completions", "decode", "decode", "prefill", "prefill", "queue", "queue")
    ]
    (root,) = (span for span in found if span.name.startswith("POST"))
    assert root.parent_span_id.hex() == PARENT_ID
    for span in found:
        assert span is root or span.parent_span_id == root.span_id
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    counts = {item.key: item.value.int_value for item in root.attributes}
    assert (counts["gen_ai.usage.input_tokens"], counts["gen_ai.usage.output_tokens"]) == (3, 10)


async def test_without_the_flag_the_library_is_not_loaded() -> None:
    imports = "import sys, pagefleet_server.main, pagefleet_server.api.server"
    code = f"{imports}; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert output.decode().strip() == "[]"


async def test_a_collector_that_is_not_there_hurts_nobody(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "fine", "--otlp-endpoint", "http://127.0.0.1:9") as talk:
        for _ in range(3):
            await talk.complete("ab", max_tokens=2)
        talk.server.signal(signal.SIGTERM)
        assert await asyncio.to_thread(talk.server.wait_exit) == 0
