"""A source install on a machine without a compiler: it serves, and says with what."""

import json
import sys
from pathlib import Path

import aiohttp

from support.api_server import Talk, poll, running
from support.tiny_models import write_tiny_llama


async def test_without_a_compiler_torch_serves_and_every_place_says_so(tmp_path: Path) -> None:
    """In a warning that tells what to do, in /version and in a metric."""
    model = write_tiny_llama(tmp_path / "model")
    command = [sys.executable, "-m", "pagefleet_server.main", "--model", str(model), "--port", "0"]
    command += ["--num-kv-blocks", "64", "--threads", "1", "--drain-delay", "0"]
    environment = {
        "CXX": "/no/such/compiler",
        "PAGEFLEET_CACHE_DIR": str(tmp_path / "cache"),
        "PAGEFLEET_KERNELS_CPU_LIBRARY": "",
        "OMP_NUM_THREADS": "1",
    }
    with running(command, tmp_path / "server.log", environment) as server:
        server.wait_listening()
        async with aiohttp.ClientSession(server.base_url) as session:
            talk = Talk(server, session)
            first = json.loads((await talk.get("/version"))[1])
            assert first["version"]
            assert first["attention_backend"] in (None, "reference")
            poll(lambda: "ready after" in server.log, server, "it is ready")
            about = json.loads((await talk.get("/version"))[1])
            assert (about["attention_backend"], about["linear_backend"]) == ("reference", "torch")
            _, metrics = await talk.get("/metrics")
            info = next(line for line in metrics.splitlines() if line.startswith("pagefleet_backend_info{"))
            assert 'attention="reference"' in info
            assert 'linear="torch"' in info
            answer = await talk.complete("Hello", max_tokens=3, temperature=0, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == 3
    (warning,) = (line for line in server.log.splitlines() if "no C++ compiler (/no/such/compiler)" in line)
    assert "warning" in warning.lower()
    assert "PAGEFLEET_KERNELS_CPU_LIBRARY" in warning
