"""The way out: nothing that fits the limits breaks, and the process ends with the right code."""

import asyncio
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from support.api_server import Talk, memory_server, raw_completion

BODY: dict[str, Any] = {"prompt": "ab", "max_tokens": 30, "ignore_eos": True}


async def started_stream(talk: Talk, **body: Any) -> "asyncio.Task[list[Any]]":
    """A stream of which the first event has come."""
    first = asyncio.Event()

    async def follow() -> list[Any]:
        seen = []
        async for event in talk.events(**{**BODY, **body}):
            seen.append(event)
            first.set()
        return seen

    task = asyncio.create_task(follow())
    await first.wait()
    return task


async def test_clients_that_keep_sending_through_a_drain_lose_nothing(tmp_path: Path) -> None:
    flags = ("--drain-delay", "3.0", "--drain-timeout", "30", "--max-num-seqs", "2")
    async with memory_server(tmp_path, "slow-10", *flags) as talk:
        streams = [await started_stream(talk, max_tokens=400) for _ in range(2)]
        waiting = asyncio.create_task(talk.post("/v1/completions", **BODY))
        talk.server.signal(signal.SIGTERM)
        begun = time.monotonic()

        async def unready() -> bool:
            return (await talk.get("/readyz"))[0] == 503

        await talk.until(unready, "readiness fails")
        assert (await talk.metrics())["pagefleet_draining"] == 1
        assert (await talk.get("/livez"))[0] == 200

        codes = []
        while True:
            async with talk.session.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}) as response:
                codes.append(response.status)
                assert response.headers["Connection"] == "close"
                if response.status == 503:
                    assert "Retry-After" in response.headers
                    assert (await response.json())["error"]["code"] == "draining"
                    break
        assert codes[0] == 200, "readiness fails at once, new requests are still served"
        assert time.monotonic() - begun >= 3.0
        talk.server.signal(signal.SIGTERM)  # a second one does no harm

        for stream in streams:
            events = await stream
            assert events[-1] == "[DONE]"
            assert events[-2]["choices"][0]["finish_reason"] == "length"
        status, answer = await waiting
        assert (status, answer["usage"]["completion_tokens"]) == (200, 30)
        assert await asyncio.to_thread(talk.server.wait_exit) == 0


@dataclass
class Sent:
    """What one pooled client saw, request after request, until nobody listened any more."""

    statuses: list[int] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)


async def keep_sending(talk: Talk, number: int) -> Sent:
    """One connection that is kept alive as long as the server lets it; streams and whole answers by turns."""
    sent = Sent()
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(talk.server.base_url, connector=connector) as session:
        while True:
            body = {
                "prompt": "ab",
                "max_tokens": 8,
                "ignore_eos": True,
                "stream": (len(sent.statuses) + number) % 2 == 0,
            }
            try:
                async with session.post("/v1/completions", json=body) as response:
                    answer = await response.text()
            except aiohttp.ClientConnectorError:
                return sent  # nobody listens: the server has ended
            except aiohttp.ClientError as error:
                if 503 not in sent.statuses:  # later it may have been the moment in which the server ended
                    sent.torn.append(repr(error))
                return sent
            sent.statuses.append(response.status)
            if response.status == 200 and not (
                answer.endswith("data: [DONE]\n\n") or '"finish_reason":"length"' in answer
            ):
                sent.torn.append(answer[-200:])
            if response.status == 503:
                assert response.headers["Retry-After"] and '"draining"' in answer


async def test_pooled_clients_that_never_stop_sending_lose_nothing(tmp_path: Path) -> None:
    flags = ("--drain-delay", "1.5", "--drain-timeout", "60", "--max-num-seqs", "4")
    async with memory_server(tmp_path, "slow-10", *flags) as talk:
        reader, writer = await talk.connect()  # a connection that is idle when the drain begins
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await reader.readline()
        clients = [asyncio.create_task(keep_sending(talk, number)) for number in range(8)]
        long = await started_stream(talk, max_tokens=300)
        talk.server.signal(signal.SIGTERM)

        async def draining() -> bool:
            return await talk.gauge("pagefleet_draining") == 1

        await talk.until(draining, "it drains")
        writer.write(raw_completion(prompt="ab", max_tokens=2))
        received = await asyncio.wait_for(reader.read(), 20)
        assert b"HTTP/1.1 200" in received and b"Connection: close" in received, "then the connection ends"
        writer.close()
        assert (await long)[-1] == "[DONE]"
        assert await asyncio.to_thread(talk.server.wait_exit) == 0
        for sent in await asyncio.gather(*clients):
            refused = sent.statuses.index(503) if 503 in sent.statuses else len(sent.statuses)
            assert refused >= 3, "served while endpoints lag"
            assert set(sent.statuses[:refused]) == {200} and set(sent.statuses[refused:]) <= {503}
            assert sent.torn == []


async def test_a_stream_that_does_not_fit_ends_with_an_error_that_says_so(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "slow-50", "--drain-delay", "0", "--drain-timeout", "0.4") as talk:
        stream = await started_stream(talk, max_tokens=400)
        whole = asyncio.create_task(talk.post("/v1/completions", **{**BODY, "max_tokens": 400}))

        async def both_run() -> bool:
            return await talk.gauge("vllm:num_requests_running") == 2

        await talk.until(both_run, "both run")
        talk.server.signal(signal.SIGTERM)
        events = await stream
        assert "drain timeout of 0.4 s" in events[-1]["error"]["message"]
        assert events[-1]["error"]["code"] == "draining"
        assert "[DONE]" not in events
        status, answer = await whole
        assert (status, answer["error"]["code"]) == (503, "draining")
        assert await asyncio.to_thread(talk.server.wait_exit) == 0


async def test_an_idle_server_ends_when_the_delay_is_over(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "fine", "--drain-delay", "0.5") as talk:
        begun = time.monotonic()
        talk.server.signal(signal.SIGTERM)
        assert await asyncio.to_thread(talk.server.wait_exit) == 0
        assert time.monotonic() - begun >= 0.5


async def test_drain_over_http_is_the_same(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "fine", "--drain-delay", "0.3", "--drain-timeout", "7") as talk:
        for path in ("/drain", "/reset_prefix_cache"):  # a page in this machine's browser is a loopback peer, too
            async with talk.session.post(path, headers={"Origin": "https://elsewhere.example"}) as response:
                assert response.status == 403
        assert (await talk.get("/readyz"))[0] == 200
        status, answer = await talk.post("/drain")
        assert (status, answer["draining"], answer["timeout_seconds"]) == (202, True, 7)
        assert (await talk.get("/readyz"))[0] == 503
        assert await asyncio.to_thread(talk.server.wait_exit) == 0


async def test_an_interrupt_ends_it_at_once(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "slow-50", "--drain-delay", "60") as talk:
        stream = await started_stream(talk, max_tokens=400)
        talk.server.signal(signal.SIGINT)
        begun = time.monotonic()
        assert await asyncio.to_thread(talk.server.wait_exit) == 130
        assert time.monotonic() - begun < 10
        assert "error" in (await stream)[-1], "an open stream is told, not torn"


async def test_an_engine_that_dies_during_the_drain_is_no_success(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "fails-at-10", "--drain-delay", "0", "--drain-timeout", "30") as talk:
        stream = await started_stream(talk, max_tokens=400)
        talk.server.signal(signal.SIGTERM)
        assert (await stream)[-1]["error"]["code"] == "engine_dead"
        assert await asyncio.to_thread(talk.server.wait_exit) == 1


async def test_signals_in_a_row_up_to_the_very_end_do_no_harm(tmp_path: Path) -> None:
    """One that came while the interpreter was winding down killed the process: a drain that looked like a crash."""
    async with memory_server(tmp_path, "fine", "--drain-delay", "0") as talk:
        while talk.server.process.poll() is None:
            talk.server.signal(signal.SIGTERM)
            await asyncio.sleep(0.001)
        assert talk.server.process.returncode == 0
