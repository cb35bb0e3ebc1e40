"""The main job with real processes: kubectl apply -> operator -> pod -> server -> tokens -> metrics -> replicas."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from demo.load import Load
from support.fleet import Fleet, deployment, http
from support.tiny_models import write_tiny_llama

pytestmark = pytest.mark.e2e

GREEDY = {"prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_positions=4096)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


def complete(url: str, **changes: Any) -> tuple[int, str]:
    return http(f"{url}/v1/completions", {**GREEDY, **changes})


def server_gauge(metrics: str, name: str, labels: str = "") -> float:
    found = re.search(rf"^{name}{{[^}}]*{labels}[^}}]*}} (\S+)$", metrics, re.MULTILINE)
    assert found, f"{name} is not in the metrics"
    return float(found.group(1))


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _environment(process: psutil.Process) -> list[str]:
    try:
        return [f"{key}={value}" for key, value in process.environ().items()]
    except psutil.Error:
        return []


def test_applied_object_answers_through_its_service_and_goes_without_a_trace(fleet: Fleet, model: Path) -> None:
    fleet.apply(deployment("plain", model))
    fleet.wait_available("plain")
    status, text = complete(fleet.service_url("plain"))
    assert status == 200, text
    assert json.loads(text)["usage"]["completion_tokens"] == 8
    row = fleet.kubectl("get", "llmd", "plain", "--no-headers").split()
    assert row[1] == "plain"
    assert row[2] == "1/1"
    metadata = fleet.get("llmd", "plain")["metadata"]
    assert "finalizers" not in metadata
    assert not any("kopf" in key for key in metadata.get("annotations", {}))
    fleet.kubectl("delete", "llmd", "plain", "--wait=true")
    owned = ("get", "deployments,services,replicasets,pods", "-l", "pagefleet.dev/llmdeployment=plain", "-o", "name")
    fleet.until("its children are collected", lambda: fleet.kubectl(*owned) == "", seconds=60)


def test_kv_percent_is_within_one_point_of_the_servers_gauge_under_held_load(fleet: Fleet, model: Path) -> None:
    """The engine is stopped in the middle of its work, so that what is held stays held while both are read."""
    fleet.apply(deployment("held", model, engine={"args": ["--threads=1", "--num-kv-blocks=600"]}))
    fleet.wait_available("held")
    pod = fleet.pods("held")[0]
    base = f"http://{pod['status']['podIP']}:8000"

    async def hold() -> None:
        async with Load(fleet.service_url("held"), streams=6, max_tokens=2500, prompt_repeats=20):
            engine = await asyncio.to_thread(_busy_engine, base)
            engine.suspend()
            try:
                await asyncio.to_thread(
                    fleet.until, "KV% is the server's", lambda: abs(shown() - gauge()) <= 1, seconds=10
                )
                for _ in range(5):
                    assert abs(await asyncio.to_thread(shown) - await asyncio.to_thread(gauge)) <= 1
            finally:
                engine.resume()
            fleet.kubectl("delete", "llmd", "held", "--wait=false")

    def gauge() -> float:
        return 100 * server_gauge(http(f"{base}/metrics")[1], "vllm:kv_cache_usage_perc")

    def shown() -> float:
        occupancy = fleet.get("llmd", "held")["status"].get("kvBlocks", {}).get("occupancy", "0%")
        return float(occupancy.rstrip("%"))

    def _busy_engine(url: str) -> psutil.Process:
        fleet.until(
            "blocks are in use",
            lambda: server_gauge(http(f"{url}/metrics")[1], "vllm:kv_cache_usage_perc") > 0.2,
            seconds=30,
        )
        return _engine_of(fleet, pod)

    asyncio.run(hold())


def _engine_of(fleet: Fleet, pod: dict[str, Any]) -> psutil.Process:
    """The engine process of one pod: the child of the server that listens on the pod's address."""
    for process in psutil.process_iter():
        environment = _environment(process)
        if f"PAGEFLEET_HOST={pod['status']['podIP']}" in environment and "pagefleet_server.engine" in _command(process):
            return process
    raise AssertionError(f"no engine runs for {pod['metadata']['name']}")


def test_load_scales_the_fleet_out_and_in_and_breaks_no_stream(fleet: Fleet, model: Path) -> None:
    fleet.apply(
        deployment(
            "scaled",
            model,
            engine={"maxNumSeqs": 16, "args": ["--threads=1", "--num-kv-blocks=60"]},
            autoscaling={
                "minReplicas": 1,
                "maxReplicas": 2,
                "targets": {"kvBlockOccupancyPercent": 80},
                "behavior": {"scaleDown": {"stabilizationWindowSeconds": 5}},
            },
        )
    )
    fleet.wait_available("scaled")

    async def drive() -> dict[str, int]:
        async with Load(fleet.service_url("scaled"), streams=10, max_tokens=300) as load:
            await asyncio.to_thread(fleet.until, "two replicas are ready", lambda: ready() == 2, seconds=90)
        return load.counts

    def ready() -> int:
        return int(fleet.get("llmd", "scaled").get("status", {}).get("readyReplicas", 0))

    assert ready() == 1
    counts = asyncio.run(drive())
    fleet.until(
        "one replica is left",
        lambda: (
            ready() == 1 and len(fleet.pods("scaled")) == 1 and fleet.get("llmd", "scaled")["spec"]["replicas"] == 1
        ),
        seconds=60,
    )
    assert counts["broken"] == 0
    assert counts["finished"] == counts["opened"] > 0
    fleet.kubectl("delete", "llmd", "scaled", "--wait=true")


def test_missing_model_is_named_while_the_other_objects_are_served(fleet: Fleet, model: Path) -> None:
    fleet.apply(deployment("good", model))
    fleet.apply(deployment("bad", Path("/models/that/are/not/there")))
    fleet.wait_available("good")
    fleet.until(
        "the reason shows", lambda: "/models/that/are/not/there" in str(fleet.condition("bad", "Degraded")), seconds=60
    )
    assert fleet.condition("bad", "Available").get("status") != "True"
    assert complete(fleet.service_url("good"))[0] == 200
    fleet.kubectl("delete", "llmd", "bad", "--wait=true")
    fleet.kubectl("delete", "llmd", "good", "--wait=true")


def test_dead_engine_takes_the_pod_down_and_never_answers_200(fleet: Fleet, model: Path) -> None:
    fleet.apply(deployment("mortal", model))
    fleet.wait_available("mortal")
    pod = fleet.pods("mortal")[0]
    base = f"http://{pod['status']['podIP']}:8000"
    _engine_of(fleet, pod).kill()
    answers = {complete(base)[0] for _ in range(20)}
    assert 200 not in answers, answers

    def restarted() -> bool:
        statuses = fleet.pods("mortal")[0]["status"].get("containerStatuses", [])
        return bool(statuses) and statuses[0]["restartCount"] == 1 and statuses[0]["ready"]

    fleet.until("the pod was restarted", restarted, seconds=60)
    fleet.until("it answers again", lambda: complete(fleet.service_url("mortal"))[0] == 200, seconds=20)
    fleet.kubectl("delete", "llmd", "mortal", "--wait=true")


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"model": {"source": "nonsense"}}, "spec.model.source"),
        ({"replicas": -1}, "spec.replicas"),
        ({"autoscaling": {"minReplicas": 5, "maxReplicas": 2}}, "spec.autoscaling"),
        ({"engine": {"maxNumSeqs": 0}}, "spec.engine.maxNumSeqs"),
        ({"drain": {"timeoutSeconds": "soon"}}, "spec.drain.timeoutSeconds"),
        ({"bogus": 1}, "spec.bogus"),
    ],
    ids=["source", "replicas", "min above max", "no sequences", "wrong type", "unknown field"],
)
def test_invalid_object_is_refused_with_the_fields_name(fleet: Fleet, changes: dict[str, Any], want: str) -> None:
    manifest = deployment("invalid", Path("/m"))
    manifest["spec"].update(changes)
    answer = fleet.kubectl("apply", "-f", "-", stdin=json.dumps(manifest), check=False)
    assert want in answer
    assert "not found" in fleet.kubectl("get", "llmd", "invalid", check=False)
