"""Models of a hub: names, selection, one writer, resuming, hashes, and what a bad hub may do."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagefleet_server.api.server import name_model
from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.cache_lock import CacheLock
from pagefleet_server.models.download import Download, DownloadError, default_directory
from pagefleet_server.models.hub import HubFile, HubModel, hub_model, read_listing, select
from pagefleet_server.models.hub_client import HubClient
from support.hub import COMMIT, LocalHub, serving

WEIGHTS = bytes(range(256)) * 16_384  # 4 MiB
MODEL = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "model.safetensors": WEIGHTS, "README.md": b"# hello"}
TINY = HubModel("acme/tiny")


class Naps:
    """Sleeps that take no time and are remembered."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.slept: list[float] = []
        self.now = 0.0
        self._then = then

    async def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self._then()
        await asyncio.sleep(0)


def download(
    hub: LocalHub, folder: Path, model: HubModel = TINY, *, naps: Naps | None = None, **access: Any
) -> Download:
    naps = naps or Naps()
    return Download(model, folder, HubClient(hub.url, **access), sleep=naps, clock=lambda: naps.now)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - what is waited for is a file, or a number of another task
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("hf://acme/tiny", HubModel("acme/tiny")),
        ("acme/tiny", HubModel("acme/tiny")),
        ("hf://acme/tiny-1.5B@v1.0", HubModel("acme/tiny-1.5B", "v1.0")),
        ("acme/tiny@refs/pr/3", HubModel("acme/tiny", "refs/pr/3")),
        ("hf://acme/tiny@main/sub dir/q4.gguf", HubModel("acme/tiny", "main", "sub dir/q4.gguf")),
        ("hf://acme/tiny/q4_0.gguf", HubModel("acme/tiny", "main", "q4_0.gguf")),
        ("/models/tiny", None),
        ("./acme/tiny", None),
        ("models/tiny.gguf", None),
        ("tiny", None),
        ("a/b/c", None),
    ],
)
def test_names(name: str, want: HubModel | None) -> None:
    assert hub_model(name) == want


def test_a_path_that_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_model("acme/tiny") is None


@pytest.mark.parametrize(
    "name", ["hf://", "hf://acme", "hf://acme/../x", "hf://acme/tiny@", "hf://acme/tiny/../x.gguf", "hf://a/b c"]
)
def test_malformed_names_are_refused_with_the_form(name: str) -> None:
    with pytest.raises(ModelError, match="hf://org/name"):
        hub_model(name)


def listed(*names: str) -> list[HubFile]:
    return [HubFile(name, 1, None, "0") for name in names]


def test_only_what_a_server_needs_is_fetched() -> None:
    names = [
        *(
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "merges.txt",
            "spiece.model",
        ),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"),
    ]
    other = [
        *(
            "README.md",
            ".gitattributes",
            "modeling_x.py",
            "pytorch_model.bin",
            "consolidated.safetensors",
            "tf_model.h5",
        ),
        *("onnx/model.safetensors", "../escape.json", "/etc/x.json", "sub/config.json", "q4.gguf", "-rf.json"),
    ]
    chosen = select(TINY, listed(*names, *other))
    assert sorted(file.name for file in chosen) == sorted(names)


@pytest.mark.parametrize(
    ("names", "model", "want"),
    [
        (("README.md",), TINY, "no config.json"),
        (("q4.gguf", "q8.gguf"), TINY, "name one of its .gguf files"),
        (("config.json", "pytorch_model.bin"), TINY, "convert its weights"),
        (("q4.gguf",), HubModel("acme/tiny", "main", "q5.gguf"), "it has q4.gguf"),
    ],
)
def test_a_repository_without_such_a_model_is_refused(names: tuple[str, ...], model: HubModel, want: str) -> None:
    with pytest.raises(ModelError, match=want):
        select(model, listed(*names))


@pytest.mark.parametrize(
    "answer",
    [None, [], {}, {"sha": "x", "siblings": []}, {"sha": COMMIT}, {"sha": COMMIT, "siblings": [{"rfilename": "a"}]}]
    + [
        {"sha": COMMIT, "siblings": [{"rfilename": "a", "size": size, "blobId": "0"}]}
        for size in (-1, 2**60, "x", None)
    ],
)
def test_a_list_that_is_none_is_refused(answer: Any) -> None:
    with pytest.raises(ModelError, match="HF_ENDPOINT"):
        read_listing("acme/tiny", answer)


async def test_a_model_arrives_whole_and_is_not_asked_for_again(tmp_path: Path) -> None:
    async with serving(LocalHub(dict(MODEL), token="s3cret")) as hub:
        work = download(hub, tmp_path, headers={"Authorization": "Bearer s3cret"})
        path = await work.run()
        assert {item.name: item.read_bytes() for item in path.iterdir()} == {
            name: content for name, content in MODEL.items() if name != "README.md"
        }
        assert path == tmp_path / "acme--tiny" / COMMIT
        assert (work.progress.done_bytes, work.progress.percent) == (work.progress.total_bytes, 100)
        asked = len(hub.asked)
        hub.list_statuses = [500] * 99
        assert await download(hub, tmp_path).run() == path, "neither hub nor token is needed any more"
        assert await download(hub, tmp_path, HubModel("acme/tiny", COMMIT)).run() == path
        assert len(hub.asked) == asked
        left = {item.name for item in (tmp_path / "acme--tiny").iterdir()}
        assert left == {COMMIT, "refs"}, "no lock and nothing half done stays"


async def test_one_file_of_a_repository(tmp_path: Path) -> None:
    async with serving(LocalHub({"gguf/q4.gguf": WEIGHTS, "q8.gguf": b"no"})) as hub:
        path = await download(hub, tmp_path, HubModel("acme/tiny", "main", "gguf/q4.gguf")).run()
        assert path.name == "q4.gguf"
        assert path.read_bytes() == WEIGHTS
        other = await download(hub, tmp_path, HubModel("acme/tiny", "main", "q8.gguf")).run()
        assert other.read_bytes() == b"no"


async def test_a_broken_connection_is_resumed_where_it_broke(tmp_path: Path) -> None:
    cuts = {"config.json": [1], "model.safetensors": [2_000_000]}
    async with serving(LocalHub(dict(MODEL), piece_bytes=1 << 16, cuts=cuts)) as hub:
        path = await download(hub, tmp_path).run()
        assert (path / "model.safetensors").read_bytes() == WEIGHTS
        ranges = [part for name, part, _ in hub.asked if name.endswith("safetensors")]
        assert len(ranges) == 2
        assert 0 < int(ranges[1].removeprefix("bytes=").rstrip("-")) <= 2_000_000


@pytest.mark.parametrize("ranges", [True, False])
async def test_what_a_dead_server_left_is_used(tmp_path: Path, ranges: bool) -> None:
    partial = tmp_path / "acme--tiny" / f"{COMMIT}.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(WEIGHTS[:3_000_000])
    (partial / "config.json").write_bytes(b"{} longer than it may be")
    async with serving(LocalHub(dict(MODEL), ranges=ranges)) as hub:
        path = await download(hub, tmp_path).run()
        assert (path / "model.safetensors").read_bytes() == WEIGHTS
        assert (path / "config.json").read_bytes() == b"{}"
        assert "bytes=3000000-" in {part for _, part, _ in hub.asked}


async def test_what_a_dead_server_left_damaged_is_fetched_anew(tmp_path: Path) -> None:
    partial = tmp_path / "acme--tiny" / f"{COMMIT}.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"?" + WEIGHTS[1:])
    async with serving(LocalHub(dict(MODEL))) as hub:
        path = await download(hub, tmp_path).run()
        assert (path / "model.safetensors").read_bytes() == WEIGHTS


async def test_a_damaged_file_is_fetched_again_and_never_published(tmp_path: Path) -> None:
    async with serving(LocalHub(dict(MODEL), damage=1)) as hub:
        path = await download(hub, tmp_path).run()
        assert (path / "model.safetensors").read_bytes() == WEIGHTS
        hub.damage = 99
        with pytest.raises(DownloadError, match="wrong hash"):
            await download(hub, tmp_path / "other").run()
        assert not (tmp_path / "other" / "acme--tiny" / COMMIT).exists()


async def test_an_unwell_hub_is_tried_a_bounded_number_of_times(tmp_path: Path) -> None:
    async with serving(LocalHub(dict(MODEL), list_statuses=[503, 429], statuses=[500, 502])) as hub:
        naps = Naps()
        await download(hub, tmp_path, naps=naps).run()
        assert naps.slept[:2] == [1.0, 7.0], "the hub's own wish to wait is kept"
        hub.list_statuses = [500] * 99
        naps = Naps()
        with pytest.raises(DownloadError, match=r"500.*tries brought nothing"):
            await download(hub, tmp_path / "other", naps=naps).run()
        assert len(naps.slept) == 5
        assert max(naps.slept) <= 30


@pytest.mark.parametrize("endpoint", ["nonsense", "hub.example.org", "ftp://hub.example.org", "", "https://"])
def test_a_hub_that_is_no_address_is_refused_at_once(endpoint: str) -> None:
    """It was tried six times."""
    with pytest.raises(ModelError, match=r"HF_ENDPOINT: .* is no address"):
        HubClient(endpoint)


async def test_a_folder_that_cannot_be_written_is_told_before_the_hub_is_asked(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DownloadError, match=r"cannot be written: .*check the volume"):
        await download(LocalHub({}, url="http://127.0.0.1:1"), tmp_path / "file" / "models").run()


async def test_nobody_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="HF_ENDPOINT"):
        await download(LocalHub({}, url="http://127.0.0.1:1"), tmp_path).run()


@pytest.mark.parametrize(
    ("changes", "model", "want"),
    [
        ({"token": "x"}, TINY, "token"),
        ({}, HubModel("acme/other"), "no such model"),
        ({}, HubModel("acme/tiny", "v9"), "no such model, revision"),
    ],
)
async def test_what_waiting_does_not_change_is_said_at_once(
    tmp_path: Path, changes: dict[str, Any], model: HubModel, want: str
) -> None:
    async with serving(LocalHub(dict(MODEL), **changes)) as hub:
        naps = Naps()
        with pytest.raises(ModelError, match=want):
            await download(hub, tmp_path, model, naps=naps).run()
        assert naps.slept == []


async def test_the_token_is_not_sent_on_to_another_host(tmp_path: Path) -> None:
    async with serving(LocalHub(dict(MODEL))) as store, serving(LocalHub(dict(MODEL), token="t")) as hub:
        hub.redirect_to = store.url.replace("127.0.0.1", "localhost")
        await download(hub, tmp_path, headers={"Authorization": "Bearer t"}).run()
        assert store.asked
        assert {token for _, _, token in store.asked} == {""}


async def test_offline_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        await download(LocalHub({}), tmp_path, offline=True).run()


async def test_a_folder_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(LocalHub(dict(MODEL))) as hub:
        monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
        with pytest.raises(ModelError, match="1000 left"):
            await download(hub, tmp_path).run()


async def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "acme--tiny").write_text("a file")
    async with serving(LocalHub(dict(MODEL))) as hub:
        with pytest.raises(DownloadError, match="check the volume"):
            await download(hub, tmp_path).run()


async def test_two_servers_write_once(tmp_path: Path) -> None:
    async with serving(LocalHub(dict(MODEL), gate=asyncio.Event())) as hub:
        first = asyncio.create_task(download(hub, tmp_path).run())
        lock = tmp_path / "acme--tiny" / f"{COMMIT}.lock"
        await until(lambda: lock.exists() and lock.read_text().endswith("}"))
        lock.write_text(lock.read_text().replace(f'"pid": {os.getpid()}', '"pid": 1'))  # another process of this host
        waiting = Download(TINY, tmp_path, HubClient(hub.url), sleep=Naps(), clock=lambda: 0.0)  # nothing grows stale
        second = asyncio.create_task(waiting.run())
        await until(lambda: "another replica" in waiting.progress.state)
        assert hub.gate is not None
        hub.gate.set()
        assert await first == await second
        assert len([path for path, _, _ in hub.asked if path.endswith("safetensors")]) == 1


async def test_cancelled_it_leaves_no_lock_and_what_came_is_used(tmp_path: Path) -> None:
    async with serving(LocalHub(dict(MODEL), gate=asyncio.Event(), piece_bytes=1 << 16)) as hub:
        work = download(hub, tmp_path)
        task = asyncio.create_task(work.run())
        await until(lambda: work.progress.done_bytes >= 1 << 16)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert not (tmp_path / "acme--tiny" / f"{COMMIT}.lock").exists()
        hub.gate = None
        await download(hub, tmp_path).run()
        assert any(part for _, part, _ in hub.asked)


class TestLock:
    def lock(self, path: Path, now: list[float], *, host: str = "a", pid: int = 1) -> CacheLock:
        return CacheLock(path / "x.lock", clock=lambda: now[0], host=host, pid=pid)

    def test_the_second_one_waits_until_it_is_released(self, tmp_path: Path) -> None:
        now = [0.0]
        first, second = self.lock(tmp_path, now), self.lock(tmp_path, now, host="b")
        assert first.try_acquire()
        assert not second.try_acquire()
        first.release()
        assert second.try_acquire()

    def test_a_lock_that_is_touched_is_never_stale(self, tmp_path: Path) -> None:
        now = [0.0]
        first, second = self.lock(tmp_path, now), self.lock(tmp_path, now, host="b")
        assert first.try_acquire()
        for step in range(10):
            now[0] += 50
            os.utime(tmp_path / "x.lock", (step, step))
            assert not second.try_acquire()

    def test_an_untouched_one_is_taken_over_once_and_its_owner_learns_it(self, tmp_path: Path) -> None:
        now = [0.0]
        first, second, third = (self.lock(tmp_path, now, host=host) for host in "abc")
        assert first.try_acquire()
        assert not second.try_acquire()
        assert not third.try_acquire()
        now[0] += 61
        assert second.try_acquire()
        assert not third.try_acquire(), "the new lock is fresh"
        assert not first.beat()
        first.release()
        assert second.beat(), "a late owner releases nothing"

    def test_a_breaker_that_comes_late_puts_the_fresh_lock_back(self, tmp_path: Path) -> None:
        now = [0.0]
        first, second, third = (self.lock(tmp_path, now, host=host) for host in "abc")
        assert first.try_acquire()
        stale = third._read(tmp_path / "x.lock")
        first.release()
        assert second.try_acquire()
        assert not third._break(stale)
        assert second.beat()

    def test_a_dead_process_of_this_host_is_not_waited_for(self, tmp_path: Path) -> None:
        now = [0.0]
        assert self.lock(tmp_path, now, pid=2**30).try_acquire()
        assert self.lock(tmp_path, now, pid=os.getpid()).try_acquire()

    def test_a_lock_without_sense_is_stale_after_its_time(self, tmp_path: Path) -> None:
        now = [0.0]
        (tmp_path / "x.lock").write_text("[not json")
        lock = self.lock(tmp_path, now)
        assert not lock.try_acquire()
        now[0] += 61
        assert lock.try_acquire()


def test_where_models_are_kept() -> None:
    assert default_directory({"PAGEFLEET_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c/models")
    assert default_directory({"XDG_CACHE_HOME": "/x"}) == Path("/x/pagefleet/models")


@pytest.mark.parametrize(
    ("model", "want"),
    [
        ("hf://acme/tiny-1.5B@v1.0", "tiny-1.5B"),
        ("acme/tiny@refs/pr/3", "tiny"),
        ("hf://acme/tiny@main/sub/q4_0.gguf", "q4_0"),
        ("hf://nonsense", "nonsense"),
        ("/models/tiny.gguf", "tiny"),
        ("/models/tiny-1.5B", "tiny-1.5B"),
    ],
)
def test_a_model_is_served_under_its_own_name_without_the_revision(model: str, want: str) -> None:
    assert name_model(model) == want
