"""The same requests to us and to vLLM: every difference is in docs/differences-from-vllm.md, and nothing else is."""

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.serving.peers import vllm
from benchmarks.serving.servers import free_port
from support.api_differences import (
    CASES,
    Differences,
    compare,
    compare_metrics,
    listed,
    observe,
)
from support.evidence import write_evidence
from support.third_party import ROOT, TOOL_TEMPLATE, needs, serving, write_model

pytestmark = pytest.mark.long
PAGE = ROOT / "docs" / "differences-from-vllm.md"
START_SECONDS = 1500.0


@contextmanager
def vllm_serving(model: Path, log: Path) -> Iterator[str]:
    """vLLM on the same directory, in float32."""
    paths = needs("vllm", "vllm")
    peer = vllm(paths, model, dtype="float32")
    port = free_port()
    flags = ("--max-logprobs", "20", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    peer = replace(peer, command=(*peer.command, *flags))
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "OMP_NUM_THREADS")} | peer.env
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*peer.command, "--port", str(port)], stdout=output, stderr=output, env=env | {"HF_HUB_OFFLINE": "1"}
        )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while not _answers(url):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(ours, vLLM's). PAGEFLEET_VLLM_URL names a vLLM that already serves this model in float32 as `m`."""
    needs("vllm", "vllm")
    folder = tmp_path_factory.mktemp("differences")
    model = write_model(folder, dtype="float32", template=TOOL_TEMPLATE)
    flags = ("--dtype", "float32", "--max-model-len", "4096")
    there = os.environ.get("PAGEFLEET_VLLM_URL")
    with serving(model, folder / "ours.log", *flags) as ours:
        if there:
            yield ours.base_url, there
        else:
            with vllm_serving(model, folder / "vllm.log") as theirs:
                yield ours.base_url, theirs


def test_every_difference_is_listed_and_every_listed_one_is_there(urls: tuple[str, str]) -> None:
    found = Differences()
    for case in CASES:
        compare(case, observe(urls[0], case), observe(urls[1], case), found)
    compare_metrics(_metrics(urls[0]), _metrics(urls[1]), found)
    write_evidence("differences_from_vllm", {"cases": len(CASES), "found": found.as_json()})
    missing, stale = found.rows() - listed(PAGE), listed(PAGE) - found.rows()
    assert not missing and not stale, f"{PAGE} lacks:\n{_lines(missing)}\nand lists without cause:\n{_lines(stale)}"


def _metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        text: str = response.read().decode()
    return text


def _lines(rows: set[tuple[str, str, str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " | |" for row in sorted(rows))
