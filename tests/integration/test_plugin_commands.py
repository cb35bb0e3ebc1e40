"""kubectl pagefleet as a user runs it: real kubectl, a local cluster's API, a real server behind the Service."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagefleet_plugin.endpoint import open_endpoint
from pagefleet_plugin.errors import PluginError
from pagefleet_plugin.kubectl import Kubectl as PluginKubectl
from support.api_server import Talk, memory_server
from support.cluster_targets import embedded_cluster
from support.kubectl import Kubectl, kubectl_path

ROOT = Path(__file__).resolve().parents[2]
STATUS = {
    "status": {
        "phase": "Available",
        "replicas": 2,
        "readyReplicas": 2,
        "kvBlocks": {"used": 60, "cached": 20, "total": 100, "waiting": 0},
        "requests": {"running": 9, "waiting": 0},
        "pods": [{"name": "chat-a", "state": "Ready", "occupancy": "60%", "waiting": 0}],
        "autoscaling": {
            "desiredReplicas": 2,
            "decisions": [
                {"time": "2026-03-01T11:00:00Z", "from": 1, "to": 2, "reason": "KVBlocks", "inputs": "demand 90 blocks"}
            ],
        },
    }
}
OBJECT = """
apiVersion: pagefleet.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: {source: "file:///models/m"}
  replicas: 2
  autoscaling: {minReplicas: 1, maxReplicas: 4, targets: {kvBlockOccupancyPercent: 80}}
"""


@dataclass(frozen=True)
class Plugin:
    """The plugin, started by kubectl, with a cluster of its own."""

    kubectl: Kubectl

    def __call__(self, *arguments: str, stdin: str | None = None, **environment: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)."""
        scripts = Path(sys.executable).parent
        done = subprocess.run(
            [str(kubectl_path()), "pagefleet", *arguments],
            env=self.kubectl.environment | {"PATH": f"{scripts}:{os.environ['PATH']}"} | environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout, done.stderr

    def ok(self, *arguments: str, stdin: str | None = None, **environment: str) -> str:
        code, out, err = self(*arguments, stdin=stdin, **environment)
        assert code == 0, err
        return out


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugin]:
    folder = tmp_path_factory.mktemp("plugin")
    with embedded_cluster(controllers=False) as kubeconfig:
        kubectl = Kubectl.of(kubeconfig, folder)
        kubectl.ok("apply", "-f", str(ROOT / "crds" / "llmdeployment.yaml"))
        kubectl.ok("wait", "--for=condition=Established", "crd/llmdeployments.pagefleet.dev", "--timeout=10s")
        (folder / "chat.yaml").write_text(OBJECT)
        kubectl.ok("apply", "-f", "chat.yaml")
        kubectl.ok("patch", "llmd", "chat", "--subresource=status", "--type=merge", "-p", json.dumps(STATUS))
        yield Plugin(kubectl)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Talk]:
    async with memory_server(tmp_path, "fine", "--max-queue", "64") as talk:
        yield talk


def test_top_prints_once_into_a_pipe(plugin: Plugin) -> None:
    out = plugin.ok("top")
    assert "default/chat" in out
    assert "60/100" in out
    assert "chat-a" in out


def test_top_as_json_is_the_same(plugin: Plugin) -> None:
    (found,) = json.loads(plugin.ok("top", "-A", "-o", "json"))
    assert (found["name"], found["occupancy"], found["ready"]) == ("chat", 0.6, 2)


def test_top_of_an_empty_namespace_says_so(plugin: Plugin) -> None:
    assert "No LLMDeployment" in plugin.ok("top", "-n", "kube-system")


def test_explain_gives_the_last_change(plugin: Plugin) -> None:
    out = plugin.ok("explain", "chat")
    assert "wants 2 replicas" in out
    assert "1 → 2, because of the KV-cache blocks in use" in out
    assert json.loads(plugin.ok("explain", "chat", "-o", "json"))["wanted"] == 2


def test_a_name_that_is_not_there_is_kubectls_own_error(plugin: Plugin) -> None:
    code, _, err = plugin("explain", "nobody")
    assert code == 1
    assert "not found" in err
    assert "Traceback" not in err


def test_a_cluster_that_does_not_answer_is_one_line(plugin: Plugin, tmp_path: Path) -> None:
    (tmp_path / "none").write_text("")
    code, _, err = plugin("top", KUBECONFIG=str(tmp_path / "none"))
    assert code == 1
    assert err.startswith("error: ") and not err.startswith("error: error")
    assert len(err.splitlines()) == 1


async def test_chat_streams_one_answer(plugin: Plugin, server: Talk) -> None:
    url = server.server.base_url
    out = await asyncio.to_thread(plugin.ok, "chat", "chat", "hello", "--url", url, "--max-tokens", "5")
    assert out.strip()


async def test_chat_keeps_the_conversation_and_survives_a_refusal(plugin: Plugin, server: Talk) -> None:
    """The second question is too long for the model; the third must still be answered."""
    questions = "one\n" + "a" * 5000 + "\nthree\n"
    arguments = ("chat", "chat", "--url", server.server.base_url, "--max-tokens", "3")
    out = await asyncio.to_thread(plugin.ok, *arguments, stdin=questions)
    first, _, rest = out.partition("[the server answered 400")
    assert first.strip()
    assert rest.rpartition("]")[2].strip()


async def test_bench_measures_every_request(plugin: Plugin, server: Talk) -> None:
    arguments = ("bench", "chat", "--url", server.server.base_url, "--requests", "6", "--concurrency", "3")
    out = await asyncio.to_thread(plugin.ok, *arguments, "--max-tokens", "9", "-o", "json")
    found = json.loads(out)
    assert (found["requests"], found["failed"]) == (6, 0)
    assert found["tokens_per_second"] > 0
    assert found["first_token_ms"]["p50"] > 0
    text = await asyncio.to_thread(plugin.ok, *arguments, "--max-tokens", "4")
    assert "output tokens/s" in text


async def test_bench_fails_when_requests_fail(plugin: Plugin) -> None:
    arguments = ("bench", "chat", "--url", "http://127.0.0.1:9", "--requests", "2", "-o", "json")
    code, out, err = await asyncio.to_thread(plugin, *arguments)
    assert code == 1
    assert json.loads(out)["failed"] == 2
    assert "2 of 2 requests failed" in err


async def test_an_api_key_comes_from_the_environment(plugin: Plugin, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n")
    keys.chmod(0o600)
    async with memory_server(tmp_path, "fine", "--api-key-file", str(keys)) as talk:
        ask = ("chat", "chat", "hi", "--url", talk.server.base_url, "--max-tokens", "3")
        code, _, err = await asyncio.to_thread(plugin, *ask)
        assert (code, "401" in err) == (1, True)
        assert await asyncio.to_thread(lambda: plugin.ok(*ask, PAGEFLEET_API_KEY="sk-one"))


def fake_kubectl(folder: Path, port_forward: str) -> PluginKubectl:
    """A kubectl whose Service is in a far cluster: the local one has no port-forward."""
    path = folder / "kubectl"
    service = json.dumps({"spec": {"clusterIP": "10.96.0.7", "ports": [{"port": 80}]}})
    path.write_text(f"#!/bin/sh\ncase $1 in get) echo '{service}';; port-forward) {port_forward};; esac\n")
    path.chmod(0o755)
    return PluginKubectl(str(path))


async def test_a_far_service_is_reached_by_port_forward_which_ends_with_the_command(tmp_path: Path) -> None:
    forward = f'echo $$ > {tmp_path}/pid; echo "Forwarding from 127.0.0.1:4567 -> 8000"; exec sleep 600'
    async with open_endpoint(fake_kubectl(tmp_path, forward), "chat", url=None) as url:
        assert url == "http://127.0.0.1:4567"
        pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_port_forward_that_fails_says_why(tmp_path: Path) -> None:
    kubectl = fake_kubectl(tmp_path, "echo 'error: no pod is ready' >&2; exit 1")
    with pytest.raises(PluginError, match="no pod is ready"):
        async with open_endpoint(kubectl, "chat", url=None):
            pass
