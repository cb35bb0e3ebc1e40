"""Scaling with real servers under the eyes of their clients: no stream breaks, and load moves to new replicas."""

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import openai
import pytest

from demo.load import Load
from support.evidence import write_evidence
from support.fleet import Fleet, deployment, http
from support.tiny_models import write_tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.long]
CLIENTS = 12
SEQUENCES = 4
WINDOW_SECONDS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_positions=4096)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


def num_finished(address: str) -> int:
    """Requests that a pod has answered in full."""
    _, text = http(f"http://{address}:8000/metrics")
    found = re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", text, re.MULTILINE)
    return sum(int(float(value)) for value in found)


def addresses(fleet: Fleet, name: str) -> set[str]:
    """Addresses of the ready pods."""
    pods = fleet.pods(name)
    ready = [
        pod
        for pod in pods
        for c in pod["status"].get("conditions", [])
        if (c["type"], c["status"]) == ("Ready", "True")
    ]
    return {pod["status"]["podIP"] for pod in ready}


async def chat(client: openai.AsyncOpenAI, model: str) -> None:
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me a story."}],
        max_tokens=40,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"


def test_pooled_connections_move_to_a_new_replica_while_requests_wait(fleet: Fleet, model: Path) -> None:
    """A Service picks a pod per connection, and the openai client keeps its connections: without `Connection: close`
    from a replica that has a queue, a new one would stay idle as long as the clients live."""
    fleet.apply(deployment("pooled", model, engine={"maxNumSeqs": SEQUENCES}))
    fleet.wait_available("pooled")
    [old] = addresses(fleet, "pooled")

    async def drive() -> None:
        stopping = asyncio.Event()

        async def talk(client: openai.AsyncOpenAI) -> None:
            while not stopping.is_set():
                await chat(client, "pooled")

        url = f"{fleet.service_url('pooled')}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            talks = [asyncio.create_task(talk(client)) for _ in range(CLIENTS)]
            try:
                await asyncio.to_thread(fleet.until, "requests wait", lambda: num_finished(old) >= CLIENTS, seconds=60)
                fleet.kubectl("scale", "llmd", "pooled", "--replicas=2")
                await asyncio.to_thread(
                    fleet.until, "two pods are ready", lambda: len(addresses(fleet, "pooled")) == 2, seconds=90
                )
                [new] = addresses(fleet, "pooled") - {old}
                await asyncio.to_thread(
                    fleet.until, "the new pod has its share", lambda: num_finished(new) >= SEQUENCES, seconds=20
                )
            finally:
                stopping.set()
                await asyncio.gather(*talks)

    asyncio.run(drive())
    fleet.kubectl("delete", "llmd", "pooled", "--wait=true")


@dataclass
class Phases:
    """What many rounds of idle, surge, idle have shown."""

    wanted_scale_ins: int
    scale_ins: int = 0
    """Pods that were taken away by the autoscaler."""
    rounds: int = 0
    streams: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def _drive_phases(fleet: Fleet, model: Path, seen: Phases, *, replicas: int) -> None:
    name = "phases"
    fleet.apply(
        deployment(
            name,
            model,
            engine={"maxNumSeqs": 16, "args": ["--threads=1", "--num-kv-blocks=60"]},
            autoscaling={
                "minReplicas": 1,
                "maxReplicas": replicas,
                "behavior": {"scaleDown": {"stabilizationWindowSeconds": WINDOW_SECONDS}},
            },
        )
    )
    fleet.wait_available(name)
    began = time.monotonic()

    def settled(count: int) -> bool:
        found = fleet.get("llmd", name)
        return (
            found["spec"]["replicas"] == count
            and len(addresses(fleet, name)) == count
            and len(fleet.pods(name)) == count
        )

    async def surge() -> dict[str, int]:
        async with Load(fleet.service_url(name), streams=6 * replicas, max_tokens=300) as load:
            await asyncio.to_thread(fleet.until, "the fleet has grown", lambda: settled(replicas), seconds=180)
        # A trickle of long streams goes on while the fleet shrinks: those of the leaving pods must end in peace.
        async with Load(fleet.service_url(name), streams=1, max_tokens=200) as trickle:
            await asyncio.to_thread(fleet.until, "the fleet has shrunk", lambda: settled(1), seconds=180)
        return {key: value + trickle.counts[key] for key, value in load.counts.items()}

    while seen.scale_ins < seen.wanted_scale_ins:
        counts = asyncio.run(surge())
        seen.rounds += 1
        seen.scale_ins += replicas - 1
        seen.streams = {key: value + seen.streams.get(key, 0) for key, value in counts.items()}
        assert counts["broken"] == 0, (seen, counts)
        assert counts["finished"] == counts["opened"] > 0, (seen, counts)
    seen.seconds = round(time.monotonic() - began, 1)
    fleet.kubectl("delete", "llmd", name, "--wait=true")


@pytest.mark.parametrize("wanted_scale_ins", [2, 100])
def test_scale_ins_break_no_stream(fleet: Fleet, model: Path, wanted_scale_ins: int) -> None:
    seen = Phases(wanted_scale_ins)
    _drive_phases(fleet, model, seen, replicas=3)
    if wanted_scale_ins >= 100:
        write_evidence("autoscaling_scale_ins", asdict(seen))
