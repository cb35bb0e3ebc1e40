"""Schemathesis makes requests from /openapi.json, right and wrong: no 500, no hang, no status that is not stated."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from support.api_server import Talk, memory_server
from support.evidence import write_evidence

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"


SEED = 5
CONFIG = """[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 504]
"""
"""A request may ask for a deadline of 1e-300 seconds and gets 504, as it should; a hang is told by its time."""
HANG_MS = 10_000
LONG = ("--phases", "examples,coverage,fuzzing,stateful", "--max-examples", "300")


async def fuzz(talk: Talk, folder: Path, *options: str) -> str:
    """Run it, and give what it printed; a failure's text has the request."""
    (folder / "schemathesis.toml").write_text(CONFIG)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{talk.server.base_url}/openapi.json"),
        *("--checks", CHECKS, "--seed", str(SEED), "--request-timeout", "60"),
        *("--no-color", "--generation-database", "none"),
        *options,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-6000:]
    lines = [
        json.loads(line.partition("pagefleet.access ")[2])
        for line in talk.server.log.splitlines()
        if "access {" in line
    ]
    late = [line for line in lines if line["status"] == 504 or line.get("outcome") == "deadline_exceeded"]
    assert lines and not [line for line in late if line["ms"] > HANG_MS]
    metrics = await talk.until_idle()
    assert metrics['vllm:request_success_total{finished_reason="error"}'] == 0
    assert "Traceback" not in talk.server.log
    assert (await talk.complete("ab", max_tokens=2, ignore_eos=True))["usage"]["completion_tokens"] == 2
    return output.decode()


async def test_requests_made_from_the_schema(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "fine", "--max-body", "64KiB", "--request-timeout", "20") as talk:
        await fuzz(talk, tmp_path, "--phases", "fuzzing", "--max-examples", "8", "--no-shrink")


@pytest.mark.long
async def test_many_requests_made_from_the_schema(tmp_path: Path) -> None:
    async with memory_server(tmp_path, "fine", "--request-timeout", "20") as talk:
        output = await fuzz(talk, tmp_path, *LONG)
    summary = output[output.rindex(" SUMMARY ") :].splitlines()[1:]
    told = [line.strip() for line in summary if line.strip() and not line.startswith("=")]
    write_evidence("api_schema_fuzz", {"seed": SEED, "options": list(LONG), "checks": CHECKS, "summary": told})
