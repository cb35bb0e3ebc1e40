"""Rollouts and sidecars with real servers: what a client and a container beside the server see."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.load import Load
from support.fleet import Fleet, deployment
from support.tiny_models import write_tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.long]

APP = """
import json, os, time, urllib.request
url = os.environ["PAGEFLEET_BASE_URL"] + "/completions"
body = {"prompt": [5, 6, 7, 8], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
request = urllib.request.Request(url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
print("the app got", json.load(urllib.request.urlopen(request))["usage"]["completion_tokens"], "tokens", flush=True)
time.sleep(3600)
"""
"""Asks once, as soon as it runs, and would crash without an answer."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_positions=4096)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


def test_a_rollout_under_load_breaks_no_stream(fleet: Fleet, model: Path) -> None:
    fleet.apply(deployment("rolled", model))
    fleet.wait_available("rolled")
    before = {pod["metadata"]["name"] for pod in fleet.pods("rolled")}

    def is_replaced() -> bool:
        now = {pod["metadata"]["name"] for pod in fleet.pods("rolled")}
        progressing = fleet.condition("rolled", "Progressing").get("status")
        return len(now) == 1 and not now & before and progressing == "False"

    async def drive() -> dict[str, int]:
        async with Load(fleet.service_url("rolled"), streams=4, max_tokens=60) as load:
            await asyncio.sleep(1)
            fleet.apply(deployment("rolled", model, engine={"maxNumSeqs": 32}))
            await asyncio.to_thread(fleet.until, "the replica is replaced", is_replaced, seconds=90)
        return load.counts

    counts = asyncio.run(drive())
    assert counts["broken"] == 0
    assert counts["finished"] == counts["opened"] > 0
    assert fleet.kubectl("rollout", "status", "deployment/rolled", "--timeout=20s").endswith("successfully rolled out")
    assert len(fleet.kubectl("rollout", "history", "deployment/rolled").splitlines()) >= 4
    fleet.kubectl("delete", "llmd", "rolled", "--wait=true")


def test_a_container_beside_the_server_is_answered_at_once_and_follows_it_in_scaling(fleet: Fleet, model: Path) -> None:
    app = {"name": "app", "image": "any", "command": [sys.executable, "-c", APP]}
    manifest = deployment("beside", model, placement="Sidecar", template={"spec": {"containers": [app]}})
    fleet.apply(manifest)
    fleet.wait_available("beside")

    def have_asked(pods: int) -> bool:
        names = [pod["metadata"]["name"] for pod in fleet.pods("beside")]
        logs = [fleet.kubectl("logs", name, "-c", "app", check=False) for name in names]
        return len(names) == pods and all(log == "the app got 4 tokens" for log in logs)

    fleet.until("the app was answered", lambda: have_asked(1), seconds=20)
    fleet.kubectl("scale", "llmd", "beside", "--replicas=2")
    fleet.until("both apps were answered", lambda: have_asked(2), seconds=60)
    restarts = [status["restartCount"] for pod in fleet.pods("beside") for status in pod["status"]["containerStatuses"]]
    assert restarts == [0, 0], "the server was up before the app"
    fleet.kubectl("scale", "llmd", "beside", "--replicas=1")
    fleet.until("one pod is left", lambda: len(fleet.pods("beside")) == 1, seconds=60)
    fleet.kubectl("delete", "llmd", "beside", "--wait=true")
