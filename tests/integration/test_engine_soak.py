"""Random load for a while, then silence: no block, no request, no memory is left behind."""

import asyncio
import os
from dataclasses import asdict

import pytest

from pagefleet_server.client.engine_client import EngineClient
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from support.engine_clients import engine
from support.engine_soak import Load, soak
from support.evidence import write_evidence
from support.memory_engine import make_settings
from support.smollm2 import smollm2_gguf


async def test_hundreds_of_requests_without_a_model() -> None:
    async with engine(make_settings("slow-1", num_blocks=60, max_num_seqs=8)) as client:
        load = Load(seed=1, seconds=120.0, num_requests=400, max_open=30, max_prompt=100, max_new=40)
        report = await soak(client, load)
    assert report.num_requests >= 400
    assert report.num_cancelled > 10
    assert report.num_preemptions > 0
    assert report.prefix_hits_tokens > 100
    assert report.num_tokens > 1000


@pytest.mark.long
async def test_ten_minutes_on_a_real_model_leave_no_block_and_flat_memory() -> None:
    seconds = float(os.environ.get("PAGEFLEET_SOAK_SECONDS", "600"))
    settings = EngineSettings(
        model=ModelSettings(model=str(smollm2_gguf()), device="cpu", threads=1),
        cache=CacheSettings(num_kv_blocks=96),
        scheduler=SchedulerSettings(max_num_seqs=16, max_num_batched_tokens=128),
    )
    client = EngineClient(settings)
    try:
        await client.start()
        await asyncio.wait_for(client.wait_ready(), 300)
        load = Load(seed=7, seconds=seconds, max_open=40, max_prompt=300, max_new=120)
        report = await soak(client, load)
    finally:
        await client.stop()
    assert report.num_preemptions > 0
    assert report.num_cancelled > 0
    settled = report.resident_bytes[len(report.resident_bytes) // 4 :]
    assert max(settled) < min(settled) * 1.05, f"memory grows: {report.resident_bytes}"
    write_evidence("engine_soak", {"seed": load.seed, "seconds": seconds, **asdict(report)})
