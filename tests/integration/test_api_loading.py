"""A server whose weights take long: what a probe, a metric and the log say meanwhile."""

import asyncio
import json
from pathlib import Path

import aiohttp

from support.api_server import Talk, memory_command, running, write_letter_model


async def test_a_load_under_way_is_seen_everywhere(tmp_path: Path) -> None:
    command = memory_command("loads-for-ever", write_letter_model(tmp_path / "model"))
    with running(command, tmp_path / "server.log") as server:
        await asyncio.to_thread(server.wait_listening)
        async with aiohttp.ClientSession(server.base_url) as session:
            talk = Talk(server, session)

            async def under_way() -> dict[str, object] | None:
                status, text = await talk.get("/startupz")
                assert status == 503
                found: dict[str, object] = json.loads(text)
                return found if "load" in found else None

            found = await talk.until(under_way, "the load is under way")
            assert found["load"] == {"done_bytes": 1000, "total_bytes": 3000}
            assert found["detail"] == "load_weights: a third"
            assert await talk.gauge("pagefleet_model_load_bytes") == 1000
            assert await talk.gauge("pagefleet_model_load_total_bytes") == 3000
            assert "load_weights: a third" in server.log
