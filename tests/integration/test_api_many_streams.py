"""Many streams open at once: none is lost, each has all of its tokens, and probes answer meanwhile."""

import asyncio
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import pytest

from support.api_server import Talk, memory_server
from support.evidence import write_evidence


@dataclass
class Seen:
    """What a crowd of clients saw."""

    num_streams: int
    num_tokens: int
    most_open: int = 0
    """Streams that had begun and not ended, at one moment."""
    num_whole: int = 0
    slowest_livez_ms: float = 0.0
    """With what this client's own loop, busy with all streams, adds; benchmarks/api_health.py measures probes alone."""
    num_probes: int = 0
    seconds: float = 0.0


async def crowd(talk: Talk, num_streams: int, num_tokens: int) -> Seen:
    """Everybody begins at once; nobody ends before all have begun, since all have as many tokens."""
    seen = Seen(num_streams, num_tokens)
    num_open = 0
    begun = time.monotonic()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        talk.server.base_url, connector=connector, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def follow(seed: int) -> None:
            nonlocal num_open
            body = {"prompt": "ab", "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "seed": seed}
            body |= {"stream_options": {"include_usage": True}}
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 200
                num_open += 1
                seen.most_open = max(seen.most_open, num_open)
                lines = [line async for line in response.content if line.startswith(b"data: ")]
            num_open -= 1
            assert lines[-1] == b"data: [DONE]\n" and f'"completion_tokens":{num_tokens}'.encode() in lines[-2]
            seen.num_whole += 1

        streams = [asyncio.create_task(follow(seed)) for seed in range(num_streams)]
        while not all(stream.done() for stream in streams):
            asked = time.monotonic()
            assert (await talk.get("/livez"))[0] == 200
            seen.slowest_livez_ms = max(seen.slowest_livez_ms, (time.monotonic() - asked) * 1000)
            seen.num_probes += 1
            await asyncio.sleep(0.02)
        await asyncio.gather(*streams)
    seen.seconds = time.monotonic() - begun
    metrics = await talk.until_idle()
    assert metrics['vllm:request_success_total{finished_reason="length"}'] == num_streams
    assert metrics["vllm:generation_tokens_total"] == num_streams * num_tokens
    return seen


def flags(num_streams: int) -> list[str]:
    """A server that runs them all."""
    chosen = {"--max-num-seqs": num_streams, "--max-num-batched-tokens": 4 * num_streams, "--max-queue": num_streams}
    chosen["--num-kv-blocks"] = 40 * num_streams
    return [str(word) for flag in chosen.items() for word in flag]


async def test_a_hundred_streams_at_once(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "slow-20", *flags(100)) as talk:
        seen = await crowd(talk, 100, 40)
    assert seen.num_whole == seen.most_open == 100


@pytest.mark.long
async def test_a_thousand_streams_at_once(tmp_path: Path) -> None:
    """From a soft limit of 1024 open files, too, which is what many systems start with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))  # the server inherits it
    try:
        async with memory_server(tmp_path, "slow-20", *flags(1000)) as talk:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            seen = await crowd(talk, 1000, 200)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert seen.num_whole == seen.most_open == 1000
    write_evidence("api_thousand_streams", {"seeds": "0..999", **asdict(seen)})
