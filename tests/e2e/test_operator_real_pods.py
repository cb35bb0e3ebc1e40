"""Rollouts and sidecars with real servers: what a client and a container beside the server see."""

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.load import Load
from support.evidence import write_evidence
from support.fleet import Fleet, deployment, http
from support.hub import HubThread, LocalHub, files_of
from support.steady_clients import SteadyClients
from support.tiny_models import write_tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.long]


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
            await asyncio.to_thread(fleet.until, "every stream runs", lambda: load.counts["opened"] >= 4, seconds=60)
            fleet.apply(deployment("rolled", model, engine={"maxNumSeqs": 32}))
            await asyncio.to_thread(fleet.until, "the replica is replaced", is_replaced, seconds=90)
        return load.counts

    counts = asyncio.run(drive())
    assert counts["broken"] == 0
    assert counts["finished"] == counts["opened"] > 0
    assert fleet.kubectl("rollout", "status", "deployment/rolled", "--timeout=20s").endswith("successfully rolled out")
    assert len(fleet.kubectl("rollout", "history", "deployment/rolled").splitlines()) >= 4
    fleet.kubectl("delete", "llmd", "rolled", "--wait=true")


REQUEST = {"prompt": [5, 6, 7, 8], "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def test_three_rollouts_under_new_and_lasting_connections_fail_no_request(fleet: Fleet, model: Path) -> None:
    fleet.apply(deployment("steady", model, replicas=2))
    fleet.until("two replicas", lambda: len(fleet.pods("steady")) == 2 and is_settled(fleet, "steady"), seconds=90)
    begun = time.monotonic()
    steady = SteadyClients(f"{fleet.service_url('steady')}/v1/completions", REQUEST)

    async def drive() -> None:
        async with steady:
            for sequences in (16, 24, 32):
                before = {pod["metadata"]["name"] for pod in fleet.pods("steady")}
                fleet.apply(deployment("steady", model, replicas=2, engine={"maxNumSeqs": sequences}))

                def is_replaced(before: set[str] = before) -> bool:
                    now = {pod["metadata"]["name"] for pod in fleet.pods("steady")}
                    return len(now) == 2 and not now & before and is_settled(fleet, "steady")

                await asyncio.to_thread(fleet.until, "both replicas are new", is_replaced, seconds=120)

    asyncio.run(drive())
    assert steady.failures == []
    assert min(steady.answered["lasting"], steady.answered["new"]) > 20
    facts = {"rollouts": 3, "replicas": 2, "answered": dict(steady.answered), "failed": len(steady.failures)}
    write_evidence("operator_rollouts", {**facts, "seconds": round(time.monotonic() - begun, 1)})
    fleet.kubectl("delete", "llmd", "steady", "--wait=true")


def test_a_model_of_a_hub_is_fetched_once_shown_on_its_way_and_served_by_both_replicas(
    fleet: Fleet, model: Path
) -> None:
    source = HubThread(LocalHub(files_of(model), gate=asyncio.Event(), piece_bytes=1 << 16))
    with source as hub:
        env = [{"name": "HF_ENDPOINT", "value": hub.url}, {"name": "HF_HUB_OFFLINE", "value": "0"}]
        manifest = deployment("fetched", model, replicas=2)
        manifest["spec"]["model"] = {"source": f"hf://{hub.repo}", "revision": "main", "cache": {"size": "1Gi"}}
        manifest["spec"]["engine"]["env"] += env
        fleet.apply(manifest)
        fleet.until(
            "the download shows",
            lambda: "Downloading" in str(fleet.get("llmd", "fetched").get("status", {}).get("pods")),
            seconds=60,
        )
        assert fleet.condition("fetched", "Progressing")["reason"] == "Downloading"
        source.open_gate()
        fleet.until(
            "two replicas", lambda: len(fleet.pods("fetched")) == 2 and is_settled(fleet, "fetched"), seconds=90
        )
        weights = [path for path, _, _ in hub.asked if path.endswith(".safetensors")]
        assert len(weights) == 1, "one replica wrote, the other waited"
        asked = len(hub.asked)
        fleet.kubectl("rollout", "restart", "deployment/fetched")
        fleet.kubectl("rollout", "status", "deployment/fetched", "--timeout=90s")
        assert len(hub.asked) == asked, "what is in the volume is not asked for again"
    status, text = http(f"{fleet.service_url('fetched')}/v1/completions", REQUEST)
    assert status == 200, text
    fleet.kubectl("delete", "llmd", "fetched", "--wait=true")


def is_settled(fleet: Fleet, name: str) -> bool:
    found = fleet.get("llmd", name)
    status = found.get("status", {})
    progressing = [item["status"] for item in status.get("conditions", []) if item["type"] == "Progressing"]
    return progressing == ["False"] and status.get("observedGeneration") == found["metadata"]["generation"]


APP = """
import http.server, json, os, signal, socket, threading, time, urllib.request
url, here = os.environ["PAGEFLEET_BASE_URL"] + "/completions", os.environ["POD_IP"]
ending = threading.Event()
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        try:
            status, answer = 200, urllib.request.urlopen(request).read()
        except Exception as error:
            status, answer = 502, repr(error).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        if ending.is_set():
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(answer)
class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 64
    daemon_threads = False
server = Server((here, 8080), Handler)
def leave():
    ending.set()
    time.sleep(3)  # endpoints lag
    server.shutdown()
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=leave).start())
first = json.dumps({"prompt": [5, 6, 7, 8], "max_tokens": 4}).encode()
first = urllib.request.Request(url, data=first, headers={"Content-Type": "application/json"})
print("the app got", json.load(urllib.request.urlopen(first))["usage"]["completion_tokens"], "tokens", flush=True)
server.serve_forever()
server.server_close()  # waits for what is being answered
"""
"""A user's program: asks once before it listens, and would crash without an answer; then answers through the server."""


def test_a_container_beside_the_server_answers_its_clients_through_scaling_and_a_rollout(
    fleet: Fleet, model: Path
) -> None:
    app = {
        "name": "app",
        "image": "any",
        "command": [sys.executable, "-c", APP],
        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
    }
    scaling = {"maxReplicas": 2, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 3}}}
    manifest = deployment("beside", model, placement="Sidecar", template={"spec": {"containers": [app]}})
    manifest["spec"]["engine"]["args"] = ["--threads=1", "--num-kv-blocks=64"]
    manifest["spec"]["autoscaling"] = scaling
    fleet.apply(manifest)
    selector = {"pagefleet.dev/llmdeployment": "beside"}
    spec = {"selector": selector, "ports": [{"port": 80, "targetPort": 8080}]}
    fleet.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "beside-app"}, "spec": spec})
    fleet.wait_available("beside")
    (pod,) = fleet.pods("beside")
    assert fleet.kubectl("logs", pod["metadata"]["name"], "-c", "app").startswith("the app got 4 tokens")
    url, long = fleet.service_url("beside-app"), {**REQUEST, "prompt": list(range(5, 205)), "max_tokens": 400}
    begun = time.monotonic()
    few = SteadyClients(url, REQUEST, lasting=1, new=1)
    many = SteadyClients(url, long, lasting=0, new=5)

    def has(pods: int) -> bool:
        return len(fleet.pods("beside")) == pods and is_settled(fleet, "beside")

    async def drive() -> None:
        async with few:
            async with many:
                await asyncio.to_thread(fleet.until, "two replicas", lambda: has(2), seconds=120)
            await asyncio.to_thread(fleet.until, "one replica", lambda: has(1), seconds=120)
            before = {pod["metadata"]["name"] for pod in fleet.pods("beside")}
            changed = {**manifest, "spec": {**manifest["spec"], "drain": {"delaySeconds": 2, "timeoutSeconds": 20}}}
            fleet.apply(changed)

            def is_replaced() -> bool:
                return has(1) and not {pod["metadata"]["name"] for pod in fleet.pods("beside")} & before

            await asyncio.to_thread(fleet.until, "the rollout", is_replaced, seconds=120)

    asyncio.run(drive())
    assert few.failures + many.failures == []
    decisions = fleet.get("llmd", "beside")["status"]["autoscaling"]["decisions"]
    assert [(item["from"], item["to"]) for item in decisions] == [(1, 2), (2, 1)]
    assert "KVBlocks" in decisions[0]["reason"]
    restarts = [item["restartCount"] for pod in fleet.pods("beside") for item in pod["status"]["containerStatuses"]]
    assert restarts == [0], "the server was up before the app"
    facts = {
        "scalings": [1, 2, 1],
        "rollouts": 1,
        "answered": sum((few.answered + many.answered).values()),
        "failed": 0,
    }
    write_evidence("operator_sidecar", {**facts, "seconds": round(time.monotonic() - begun, 1)})
    fleet.kubectl("delete", "service", "beside-app")
    fleet.kubectl("delete", "llmd", "beside", "--wait=true")
