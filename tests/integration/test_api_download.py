"""A server that fetches its model from a hub: what a probe sees meanwhile, and how it ends when it cannot."""

import asyncio
import json
import signal
from pathlib import Path

import aiohttp

from support.api_server import Talk, memory_command, running, write_letter_model
from support.hub import LocalHub, files_of, serving


def letters(tmp_path: Path, **changes: object) -> LocalHub:
    files = files_of(write_letter_model(tmp_path / "source"))
    files |= {"config.json": b"{}", "model.safetensors": bytes(1 << 20)}
    return LocalHub(files, repo="acme/letters", piece_bytes=1 << 16, **changes)  # type: ignore[arg-type]


def environment(hub: LocalHub, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "PAGEFLEET_DOWNLOAD_DIR": str(tmp_path / "models")}


async def test_probes_and_metrics_answer_during_a_download_and_the_model_is_served_after_it(tmp_path: Path) -> None:
    async with serving(letters(tmp_path, gate=asyncio.Event())) as hub:
        command = memory_command("", Path("acme/letters"))
        with running(command, tmp_path / "server.log", environment(hub, tmp_path)) as server:
            await asyncio.to_thread(server.wait_listening)
            async with aiohttp.ClientSession(server.base_url) as session:
                talk = Talk(server, session)

                async def under_way() -> dict[str, int] | None:
                    status, text = await talk.get("/startupz")
                    found = json.loads(text)
                    assert status == 503
                    has_begun = found.get("download", {}).get("done_bytes", 0) > 0
                    return found if has_begun else None

                found = await talk.until(under_way, "the download is under way")
                assert found["detail"].startswith("Downloading: fetching: ")
                done = await talk.gauge("pagefleet_model_download_bytes")
                total = await talk.gauge("pagefleet_model_download_total_bytes")
                assert 0 < done < total == found["download"]["total_bytes"]
                assert (await talk.get("/livez"))[0] == 200
                assert (await talk.get("/readyz"))[0] == 503
                assert (await talk.post("/v1/completions", prompt="ab"))[0] == 503
                assert hub.gate is not None
                hub.gate.set()
                await talk.until_ready()
                assert await talk.gauge("pagefleet_model_download_bytes") == total
                await talk.complete("ab", max_tokens=2)


async def test_a_signal_during_a_download_ends_the_server_at_once(tmp_path: Path) -> None:
    async with serving(letters(tmp_path, gate=asyncio.Event())) as hub:
        command = memory_command("", Path("acme/letters"))
        with running(command, tmp_path / "server.log", environment(hub, tmp_path)) as server:
            await asyncio.to_thread(server.wait_listening)
            async with asyncio.timeout(30):
                while not hub.asked:  # noqa: ASYNC110 - the hub runs here, its client elsewhere
                    await asyncio.sleep(0.01)
            server.signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.wait_exit) == 0
            assert not list((tmp_path / "models").glob("**/*.lock"))


async def test_a_model_that_the_hub_does_not_have_ends_the_server_with_the_reason(tmp_path: Path) -> None:
    async with serving(letters(tmp_path)) as hub:
        command = memory_command("", Path("acme/other"))
        with running(command, tmp_path / "server.log", environment(hub, tmp_path)) as server:
            assert await asyncio.to_thread(server.wait_exit) == 3
            assert "acme/other@main: the hub answered 404" in server.log
