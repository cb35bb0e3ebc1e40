"""Samples from pods, and everything that a broken or hostile pod may answer instead."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web

from pagefleet_operator.errors import ScrapeError
from pagefleet_operator.metrics_text import DOWNLOAD_FAMILIES, FAMILIES, FIRST_TOKEN, parse_sample
from pagefleet_operator.scrape import Scraper, Target
from pagefleet_operator.settings import ScrapeSettings
from support.operator_objects import metrics_text

SETTINGS = ScrapeSettings(timeout_seconds=0.3, max_bytes=64 * 1024)


def test_a_sample_holds_what_the_server_said() -> None:
    text = metrics_text(used=61, cached=9, total=100, waiting_blocks=7, running=3, waiting=2, oldest=1.5)
    sample = parse_sample(text, time=5.0)
    assert (sample.blocks_used, sample.blocks_cached, sample.blocks_total) == (61, 9, 100)
    assert (sample.blocks_waiting, sample.running, sample.waiting) == (7, 3, 2)
    assert (sample.oldest_waiting_seconds, sample.time) == (1.5, 5.0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("empty", ""),
        ("html", "<html><body>502 Bad Gateway</body></html>"),
        ("a family is missing", metrics_text().replace("vllm:num_requests_waiting", "vllm:other")),
        ("negative", metrics_text(running=-1)),
        ("not a number", metrics_text(waiting=float("nan"))),
        ("infinite", metrics_text(waiting_blocks=float("inf"))),
        ("absurd", metrics_text(waiting_blocks=1e30)),
        ("more than there is", metrics_text(used=90, cached=20)),
        ("no cache yet", metrics_text(total=0)),
        ("too many series", "".join(f'x{{a="{index}"}} 1\n' for index in range(5000))),
        ("an endless line", metrics_text() + 'x{a="' + "y" * 100_000 + '"} 1\n'),
        ("broken labels", 'pagefleet_kv_blocks{state="used 1\n'),
        ("binary", "\x00\x01\x02"),
        (
            "a bound that is no number",
            metrics_text() + f'{FIRST_TOKEN}_bucket{{le="NaN"}} 1\n{FIRST_TOKEN}_bucket{{le="+Inf"}} 1\n',
        ),
    ],
)
def test_what_cannot_be_believed_is_no_sample(name: str, text: str) -> None:
    with pytest.raises(ScrapeError):
        parse_sample(text, time=0.0)


@pytest.mark.parametrize("piece", ["a", '"', "\\", '\\"', "{", "=", ",", " ", 'b="c",'])
@pytest.mark.parametrize("frame", ["{}", "a{{{}}} 1\n", 'a{{b="{}"}} 1\n', "a {}\n"])
def test_a_line_whose_reading_would_take_long_is_not_read(piece: str, frame: str) -> None:
    text = frame.format(piece * (ScrapeSettings().max_bytes // len(piece)))
    with pytest.raises(ScrapeError, match="a line of"):
        parse_sample(text, time=0.0)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def pod(handler: Handler) -> AsyncIterator[Target]:
    app = web.Application()
    app.router.add_get("/metrics", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield Target("uid", "127.0.0.1", runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def scrape(handler: Handler) -> Scraper:
    scraper = Scraper(SETTINGS, clock=lambda: 100.0)
    async with pod(handler) as target, scraper.session() as session:
        await scraper.scrape(session, [target])
    return scraper


DOWNLOADING = "pagefleet_model_download_bytes 42\npagefleet_model_download_total_bytes 100\n"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (DOWNLOADING, 42),
        (DOWNLOADING.replace("42", "100"), None),
        (DOWNLOADING.replace("42", "0").replace("100", "0"), None),
        (DOWNLOADING.replace("42", "nan"), None),
        (DOWNLOADING.replace("42", "-1"), None),
        (DOWNLOADING.replace("100", "1e300"), None),
        ("<html>", None),
        ("", None),
    ],
)
async def test_a_starting_pod_is_asked_for_its_download_alone_and_is_never_a_failure(
    text: str, want: int | None
) -> None:
    asked: list[list[str]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.query.getall("name[]"))
        return web.Response(text=text)

    scraper = Scraper(SETTINGS, clock=lambda: 100.0)
    async with pod(answer) as target, aiohttp.ClientSession() as session:
        await scraper.scrape(session, [replace(target, is_ready=False)])
        assert asked == [list(DOWNLOAD_FAMILIES)]
        assert scraper.progress.get("uid") == want
        await scraper.scrape(session, [])
    assert scraper.progress == {}
    assert scraper.failures == {}


async def test_a_round_gives_a_sample_and_asks_only_for_what_it_needs() -> None:
    asked: list[list[str]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.query.getall("name[]"))
        return web.Response(text=metrics_text(used=5))

    scraper = await scrape(answer)
    sample = scraper.fresh("uid", 100.0)
    assert sample is not None
    assert sample.blocks_used == 5
    assert asked == [list(FAMILIES)]
    assert scraper.failures == {}


async def refuses(_: web.Request) -> web.Response:
    return web.Response(status=500, text="no")


async def redirects(_: web.Request) -> web.Response:
    return web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"})


async def sleeps(_: web.Request) -> web.Response:
    await asyncio.sleep(30)
    return web.Response()


async def pours(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(10_000):
        await response.write(b"x" * 65536)
    return response


async def drips(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"# drop\n")
        await asyncio.sleep(0.05)


async def garbles(_: web.Request) -> web.Response:
    return web.Response(body=b"\xff\xfe\xfa", content_type="text/plain")


async def packs(_: web.Request) -> web.Response:
    packed = gzip.compress(metrics_text(used=5).encode())
    return web.Response(body=packed, headers={"Content-Encoding": "gzip"}, content_type="text/plain")


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        (refuses, "answered 500"),
        (redirects, "answered 302"),
        (sleeps, "within 0.3 s"),
        (pours, "longer than 65536 bytes"),
        (drips, "within 0.3 s"),
        (garbles, "decode"),
        (packs, "decode"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_bad_answer_is_a_failure_with_its_reason(handler: Handler, why: str) -> None:
    scraper = await scrape(handler)
    assert scraper.fresh("uid", 100.0) is None
    assert why in scraper.failures["uid"]


async def test_nobody_there_is_a_failure() -> None:
    scraper = Scraper(SETTINGS, clock=lambda: 100.0)
    async with aiohttp.ClientSession() as session:
        await scraper.scrape(session, [Target("uid", "127.0.0.1", 1)])
    assert "uid" in scraper.failures


async def test_an_old_sample_is_missing_and_a_gone_pod_is_forgotten() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=metrics_text(used=5))

    scraper = Scraper(SETTINGS, clock=lambda: 100.0)
    async with pod(answer) as target, aiohttp.ClientSession() as session:
        await scraper.scrape(session, [target])
        assert scraper.fresh("uid", 100.0 + SETTINGS.stale_after_seconds) is not None
        assert scraper.fresh("uid", 100.1 + SETTINGS.stale_after_seconds) is None
        await scraper.scrape(session, [])
    assert scraper.fresh("uid", 100.0) is None


async def test_one_slow_pod_does_not_delay_the_others() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=metrics_text(used=5))

    scraper = Scraper(SETTINGS, clock=lambda: 100.0)
    async with pod(sleeps) as slow, pod(answer) as quick, aiohttp.ClientSession() as session:
        loop = asyncio.get_running_loop()
        started = loop.time()
        many = [Target(f"quick-{index}", quick.ip, quick.port) for index in range(30)]
        await scraper.scrape(session, [Target("slow", slow.ip, slow.port), *many])
        assert loop.time() - started < 3 * SETTINGS.timeout_seconds
    assert list(scraper.failures) == ["slow"]
