"""A thousand streams open at once: none is lost, and probes answer meanwhile."""

import asyncio
import time
from pathlib import Path

import aiohttp
import pytest

from support.api_server import memory_server

NUM_STREAMS = 1000
NUM_TOKENS = 40


@pytest.mark.long
async def test_a_thousand_streams_at_once(tmp_path: Path) -> None:
    flags = {"--max-num-seqs": NUM_STREAMS, "--max-num-batched-tokens": 4096, "--num-kv-blocks": 8000}
    flags["--max-queue"] = NUM_STREAMS
    async with memory_server(tmp_path, "slow-20", *(str(word) for flag in flags.items() for word in flag)) as talk:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(talk.server.base_url, connector=connector) as session:

            async def follow(seed: int) -> tuple[bytes, bytes]:
                body = {"prompt": "ab", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "seed": seed}
                async with session.post("/v1/completions", json=body) as response:
                    lines = [line async for line in response.content if line.startswith(b"data: ")]
                return lines[-2], lines[-1]

            streams = [asyncio.create_task(follow(seed)) for seed in range(NUM_STREAMS)]
            slowest = 0.0
            while not all(stream.done() for stream in streams):
                begun = time.monotonic()
                assert (await talk.get("/livez"))[0] == 200
                slowest = max(slowest, time.monotonic() - begun)
                await asyncio.sleep(0.05)
            for stream in streams:
                last, done = stream.result()
                assert b'"finish_reason":"length"' in last and done == b"data: [DONE]\n"
        metrics = await talk.until_idle()
        assert metrics['vllm:request_success_total{finished_reason="length"}'] == NUM_STREAMS
        assert metrics["vllm:generation_tokens_total"] == NUM_STREAMS * NUM_TOKENS
        assert slowest < 5.0, "client and server share this machine"
