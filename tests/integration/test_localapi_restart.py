"""Objects survive the end of the server when it has a data directory."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pagefleet_localcluster.api.journal import JournalError
from pagefleet_localcluster.api.server import ApiServer
from support.localapi import CONFIG_MAPS, CRDS, LLMDS, TOKEN, config_map, draft_crd, llmd, running_api, watching


async def test_objects_versions_and_crds_are_back_after_a_restart(tmp_path: Path) -> None:
    async with running_api(data_dir=tmp_path) as (_, api):
        (await api.post(CRDS, draft_crd())).ok()
        created = (await api.post(LLMDS, llmd("o", replicas=3))).ok()
        (await api.post(CONFIG_MAPS, config_map("gone"))).ok()
        (await api.delete(f"{CONFIG_MAPS}/gone")).ok()
        last = int((await api.get(CONFIG_MAPS)).ok()["metadata"]["resourceVersion"])
    async with running_api(data_dir=tmp_path) as (_, api):
        assert (await api.get(f"{LLMDS}/o")).ok() == created
        (await api.get(f"{CONFIG_MAPS}/gone")).message(404)
        new = (await api.post(CONFIG_MAPS, config_map("new"))).ok()
        assert int(new["metadata"]["resourceVersion"]) > last
        assert (await api.patch(f"{LLMDS}/o", {"spec": {"replicas": -1}})).status == 422


async def test_a_watch_from_before_the_restart_starts_anew(tmp_path: Path) -> None:
    async with running_api(data_dir=tmp_path) as (_, api):
        old = (await api.post(CONFIG_MAPS, config_map("m"))).ok()["metadata"]["resourceVersion"]
        (await api.patch(f"{CONFIG_MAPS}/m", {"data": {"a": "2"}})).ok()
    async with running_api(data_dir=tmp_path) as (_, api):
        [event] = await api.watch(CONFIG_MAPS, resourceVersion=old)
        assert event["object"]["code"] == 410


async def test_deletions_that_were_under_way_go_on(tmp_path: Path) -> None:
    async with running_api(data_dir=tmp_path) as (server, api):
        owner = {"apiVersion": "v1", "kind": "ConfigMap"} | (await api.post(CONFIG_MAPS, config_map("owner"))).ok()
        (await api.post(CONFIG_MAPS, config_map("child", owner))).ok()
        server.cluster.store.remove(("", "configmaps"), ("default", "owner"))  # the server ends before it collects
        await server.stop()
    async with running_api(data_dir=tmp_path) as (_, api):
        await api.until(lambda: api.get(f"{CONFIG_MAPS}/child"), lambda answer: answer.status == 404)


async def test_a_directory_serves_one_server_at_a_time(tmp_path: Path) -> None:
    async with running_api(data_dir=tmp_path):
        second = ApiServer("127.0.0.1", 0, TOKEN, tmp_path)
        with pytest.raises(JournalError, match="in use by another API server"):
            await second.start()
        await second.stop()


def _cut(text: bytes) -> bytes:
    return text[:-20]


def _spoil(text: bytes) -> bytes:
    lines = text.split(b"\n")
    lines[0] = b'{"broken'
    return b"\n".join(lines)


@pytest.mark.parametrize(("damage", "works"), [(_cut, True), (_spoil, False)], ids=["a line cut off", "a broken line"])
async def test_a_line_cut_off_is_forgiven_and_a_broken_one_is_named(
    tmp_path: Path, damage: Callable[[bytes], bytes], works: bool
) -> None:
    async with running_api(data_dir=tmp_path) as (_, api):
        (await api.post(CONFIG_MAPS, config_map("m"))).ok()
        (await api.post(CONFIG_MAPS, config_map("last"))).ok()
    path = tmp_path / "objects.jsonl"
    path.write_bytes(damage(path.read_bytes()))
    if not works:
        server = ApiServer("127.0.0.1", 0, TOKEN, tmp_path)
        with pytest.raises(JournalError, match="line 1, is damaged"):
            await server.start()
        await server.stop()
        return
    async with running_api(data_dir=tmp_path) as (_, api):
        assert (await api.get(f"{CONFIG_MAPS}/m")).status == 200


async def test_the_file_stays_small_however_much_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagefleet_localcluster.api.journal._MIN_COMPACT_BYTES", 50_000)
    async with running_api(data_dir=tmp_path) as (_, api):
        (await api.post(CONFIG_MAPS, config_map("m"))).ok()
        for index in range(100):
            (await api.patch(f"{CONFIG_MAPS}/m", {"data": {"a": str(index) + "x" * 5000}})).ok()
        path = tmp_path / "objects.jsonl"
        assert os.stat(path).st_size < 100_000
    async with running_api(data_dir=tmp_path) as (_, api):
        assert (await api.get(f"{CONFIG_MAPS}/m")).ok()["data"]["a"].startswith("99x")


async def test_stopping_ends_open_watches_at_once() -> None:
    async with running_api() as (server, api):
        watch = asyncio.create_task(api.watch(CONFIG_MAPS, seconds=60))
        await watching(server, 1)
        start = asyncio.get_running_loop().time()
        await server.stop()
        assert asyncio.get_running_loop().time() - start < 3
        await asyncio.gather(watch, return_exceptions=True)
