"""guidellm and `vllm bench serve` load our server without one failed request."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.api_server import RunningServer
from support.evidence import write_evidence
from support.third_party import SERVED_NAME, call, needs, serving, write_model

pytestmark = pytest.mark.long
NUM_REQUESTS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("load-model"), dtype="bfloat16")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(model, tmp_path_factory.mktemp("load") / "server.log") as started:
        yield started


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_has_no_failed_request(server: RunningServer, model: Path, tmp_path: Path, route: str) -> None:
    guidellm = needs("guidellm", "guidellm").program("guidellm", "guidellm")
    report = tmp_path / "report.json"
    backend = f"kind=openai_http,target={server.base_url},model={SERVED_NAME},request_format={route}"
    command: list[str | Path] = [guidellm, "run", "--backend", backend, "--profile", "kind=concurrent,streams=8"]
    command += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}", "--output", f"kind=json,path={report}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={model}", "--disable-console"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=24"]
    call(command, timeout=900)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals: dict[str, Any] = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == NUM_REQUESTS and totals["errored"] == totals["incomplete"] == 0, totals
    name = "chat" if "chat" in route else "completions"
    write_evidence(f"client_guidellm_{name}", {"route": route, "totals": totals})


@pytest.mark.parametrize(("backend", "route"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_vllm_bench_serve_has_no_failed_request(
    server: RunningServer, model: Path, tmp_path: Path, backend: str, route: str
) -> None:
    vllm = needs("vllm", "vllm").program("vllm", "vllm")
    command: list[str | Path] = [
        vllm,
        "bench",
        "serve",
        "--backend",
        backend,
        "--base-url",
        server.base_url,
        "--endpoint",
        route,
    ]
    command += ["--model", SERVED_NAME, "--tokenizer", model, "--dataset-name", "random", "--random-input-len", "64"]
    command += ["--random-output-len", "64", "--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "16"]
    command += ["--ignore-eos", "--save-result", "--result-filename", tmp_path / "result.json"]
    call(command, timeout=900, VLLM_NO_USAGE_STATS="1")
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == NUM_REQUESTS and result.get("failed", 0) == 0, result
    assert result["total_output_tokens"] == NUM_REQUESTS * 64
    kept: dict[str, object] = {
        key: value for key, value in result.items() if isinstance(value, int | float | str) and key != "tokenizer_id"
    }
    write_evidence(f"client_vllm_bench_{backend}", kept)
