"""The load: sends a workload to one server and notes when each token came."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable

import aiohttp

from benchmarks.serving.outcome import Answer
from benchmarks.serving.workloads import Request, Workload

REQUEST_SECONDS = 280.0
"""An answer that takes longer has failed."""
LONGEST_LINE = 1 << 20
Fields = dict[str, object]


async def send_workload(base_url: str, workload: Workload, fields: Callable[[Request], Fields]) -> list[Answer]:
    """Send all requests; `fields` is the body of each, in the words of the server."""
    slots = asyncio.Semaphore(workload.concurrency)
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    # One connection a request: one of the servers closes kept connections under their users.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(base_url, timeout=timeout, connector=connector) as session:
        began = time.perf_counter()

        async def one(request: Request) -> Answer:
            if request.at is not None:
                await asyncio.sleep(began + request.at - time.perf_counter())
            async with slots:
                return await ask(session, request, fields(request))

        return await asyncio.gather(*(one(request) for request in workload.requests))


async def ask(session: aiohttp.ClientSession, request: Request, body: Fields) -> Answer:
    """One streamed completion."""
    sent = time.perf_counter()
    times: list[float] = []
    usage: dict[str, int] = {}
    error = ""
    try:
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                error = f"HTTP {response.status}: {(await response.text())[:200]}"
            else:
                async for event in events(response):
                    if "error" in event:
                        error = str(event["error"])[:200]
                    usage = event.get("usage") or usage
                    if any(choice.get("text") for choice in event.get("choices") or ()):
                        times.append(time.perf_counter())
    except (aiohttp.ClientError, TimeoutError, ValueError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    num_output = usage.get("completion_tokens", 0)
    if not error and (num_output != request.num_output or not times):
        error = f"{num_output} tokens in {len(times)} events, not {request.num_output}"
    return Answer(sent, tuple(times), usage.get("prompt_tokens", 0), num_output, error)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict]:  # type: ignore[type-arg]
    """The JSON documents of a stream of server-sent events, up to [DONE]."""
    buffer = b""
    async for chunk in response.content.iter_any():
        buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        if len(buffer) > LONGEST_LINE:
            raise ValueError(f"a line of more than {LONGEST_LINE} bytes")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield json.loads(data)
