"""Random load on an engine: arrivals, groups, cancellations, slow readers; then silence, and nothing may be left."""

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

from pagefleet_server.client.engine_client import EngineClient
from pagefleet_server.client.request_stream import RequestStream
from pagefleet_server.core.sampling_params import SamplingParams
from support.engine_clients import until


@dataclass
class SoakReport:
    """What happened."""

    num_requests: int = 0
    num_cancelled: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0
    prefix_hits_tokens: int = 0
    resident_bytes: list[int] = field(default_factory=list)
    """Of the engine, sampled at equal intervals."""


@dataclass(frozen=True)
class Load:
    """How much of what."""

    seed: int
    seconds: float
    """Requests arrive for so long ..."""
    max_open: int
    """Streams at once; arrivals wait beyond it."""
    max_prompt: int
    max_new: int
    num_requests: int | None = None
    """... or until so many have arrived, which says the same on a slow machine."""
    cancel_probability: float = 0.3
    num_samples: int = 20
    """Samples of the engine's memory."""


async def soak(client: EngineClient, load: Load) -> SoakReport:
    """Run the load, wait until all is over, and check that every block is free again."""
    assert client.ready is not None
    rng, report = random.Random(load.seed), SoakReport()
    loop = asyncio.get_running_loop()
    began = loop.time()
    tasks: set[asyncio.Task[None]] = set()
    families = [[rng.randrange(3, client.ready.vocab_size) for _ in range(load.max_prompt)] for _ in range(4)]
    while loop.time() - began < load.seconds and (load.num_requests is None or report.num_requests < load.num_requests):
        if (loop.time() - began) * load.num_samples >= len(report.resident_bytes) * load.seconds:
            report.resident_bytes.append(resident_bytes(client))
        if len(tasks) < load.max_open:
            shared = rng.randrange(load.max_prompt)
            prompt = [*rng.choice(families)[:shared], rng.randrange(3, client.ready.vocab_size)]
            samplings = [
                SamplingParams(max_tokens=rng.randint(1, load.max_new), temperature=0.8, seed=rng.randrange(2**32))
                for _ in range(rng.choice([1, 1, 1, 1, 3]))
            ]
            streams = client.submit_group(prompt, samplings, tenant=rng.choice("abc"), priority=rng.choice([0, 0, 1]))
            report.num_requests += len(streams)
            for stream in streams:
                stop_after = rng.randint(0, load.max_new) if rng.random() < load.cancel_probability else None
                task = asyncio.create_task(consume(stream, stop_after, report, slow=rng.random() < 0.1))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        if rng.random() < 0.01:
            client.reset_prefix_cache()
        await asyncio.sleep(rng.expovariate(1.0) * 0.004)
    await asyncio.gather(*tasks)
    await until(lambda: client.gauges is not None and not client.has_work and client.num_unread == 0, "all is over")
    gauges = client.gauges
    assert gauges is not None
    assert (gauges.blocks_used, gauges.num_running, gauges.num_waiting, gauges.blocks_waiting) == (0, 0, 0, 0)
    assert gauges.blocks_free + gauges.blocks_cached == gauges.blocks_total
    report.num_preemptions, report.prefix_hits_tokens = gauges.num_preemptions, gauges.prefix_hits_tokens
    return report


async def consume(stream: RequestStream, stop_after: int | None, report: SoakReport, *, slow: bool) -> None:
    """Read a stream to its end, or leave it after so many tokens."""
    received = 0
    with stream:
        async for output in stream:
            received += len(output.token_ids)
            report.num_tokens += len(output.token_ids)
            if stop_after is not None and received >= stop_after and output.finish_reason is None:
                report.num_cancelled += 1
                return
            if slow:
                await asyncio.sleep(0.05)


def resident_bytes(client: EngineClient) -> int:
    """Memory of the engine process."""
    status = Path(f"/proc/{client.process_id}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))
