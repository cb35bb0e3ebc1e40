"""Schemathesis makes requests from /openapi.json, right and wrong: no 500, no hang, no status that is not stated."""

import asyncio
import sys
from pathlib import Path

import pytest

from support.api_server import Talk, memory_server

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"


async def fuzz(talk: Talk, folder: Path, *options: str) -> None:
    """Run it; a failure's text has the request."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{talk.server.base_url}/openapi.json"),
        *("--checks", CHECKS, "--seed", "5", "--request-timeout", "60", "--no-color", "--generation-database", "none"),
        *options,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-6000:]
    metrics = await talk.until_idle()
    assert metrics['vllm:request_success_total{finished_reason="error"}'] == 0
    assert "Traceback" not in talk.server.log
    assert (await talk.complete("ab", max_tokens=2, ignore_eos=True))["usage"]["completion_tokens"] == 2


async def test_requests_made_from_the_schema(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "fine", "--max-body", "64KiB", "--request-timeout", "20") as talk:
        await fuzz(talk, tmp_path, "--phases", "fuzzing", "--max-examples", "8", "--no-shrink")


@pytest.mark.long
async def test_many_requests_made_from_the_schema(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "fine", "--request-timeout", "20") as talk:
        await fuzz(talk, tmp_path, "--phases", "examples,coverage,fuzzing,stateful", "--max-examples", "300")
