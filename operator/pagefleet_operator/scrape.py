"""Asks the pods for their load: own period, all pods in parallel, each with its deadline and byte limit."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import urlencode

import aiohttp

from pagefleet_operator import names
from pagefleet_operator.errors import ScrapeError, shorten
from pagefleet_operator.fleet import Sample
from pagefleet_operator.metrics_text import DOWNLOAD_FAMILIES, FAMILIES, parse_progress, parse_sample
from pagefleet_operator.settings import ScrapeSettings
from pagefleet_operator.telemetry import Telemetry

QUERY = urlencode([("name[]", family) for family in FAMILIES])
DOWNLOAD_QUERY = urlencode([("name[]", family) for family in DOWNLOAD_FAMILIES])


@dataclass(frozen=True, slots=True)
class Target:
    """One pod to ask."""

    uid: str
    ip: str
    port: int = names.SERVER_PORT
    is_ready: bool = True
    """Else it is asked how far its download is."""

    @property
    def url(self) -> str:
        """Where its metrics are; only the families that we need."""
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"http://{host}:{self.port}/metrics?{QUERY if self.is_ready else DOWNLOAD_QUERY}"


class Scraper:
    """Latest samples by pod uid, refreshed every period."""

    def __init__(
        self, settings: ScrapeSettings, *, clock: Callable[[], float] = time.time, telemetry: Telemetry | None = None
    ) -> None:
        self._telemetry = telemetry or Telemetry()
        self._settings = settings
        self._clock = clock
        self._samples: dict[str, Sample] = {}
        self._failures: dict[str, str] = {}
        self._progress: dict[str, int] = {}
        self.rounds = 0
        """Finished rounds since start."""

    def fresh(self, uid: str, now: float) -> Sample | None:
        """The pod's sample unless it is too old: missing is None, never zero."""
        sample = self._samples.get(uid)
        return sample if sample is not None and now - sample.time <= self._settings.stale_after_seconds else None

    @property
    def failures(self) -> Mapping[str, str]:
        """Why the last try failed, by pod uid; a pod that answered is not in it."""
        return MappingProxyType(self._failures)

    @property
    def progress(self) -> Mapping[str, int]:
        """Percent of the model that starting pods have downloaded, by pod uid; only of those that said so just now."""
        return MappingProxyType(self._progress)

    async def run(self, targets: Callable[[], Iterable[Target]], on_round: Callable[[], None]) -> None:
        """Scrape for ever: `targets` gives the pods of each round, `on_round` is told when one ended."""
        async with self.session() as session:
            loop = asyncio.get_running_loop()
            due = loop.time()
            while True:
                await self.scrape(session, list(targets()))
                on_round()
                due = max(due + self._settings.period_seconds, loop.time())
                await asyncio.sleep(due - loop.time())

    def session(self) -> aiohttp.ClientSession:
        """For `scrape`. Nothing is unpacked: few packed bytes could be gigabytes."""
        connector = aiohttp.TCPConnector(limit=self._settings.concurrency, limit_per_host=1)
        plain = {"Accept-Encoding": "identity"}
        return aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False, headers=plain)

    async def scrape(self, session: aiohttp.ClientSession, targets: list[Target]) -> None:
        """One round over `targets`; forgets every other pod."""
        gate = asyncio.Semaphore(self._settings.concurrency)
        with self._telemetry.scrape_seconds.time():
            asks = [(self._scrape_one if target.is_ready else self._ask_progress, target) for target in targets]
            await asyncio.gather(*(ask(session, gate, target) for ask, target in asks))
        uids = {target.uid for target in targets}
        self._samples = {uid: sample for uid, sample in self._samples.items() if uid in uids}
        starting = {target.uid for target in targets if not target.is_ready}
        self._progress = {uid: percent for uid, percent in self._progress.items() if uid in starting}
        self._failures = {uid: failure for uid, failure in self._failures.items() if uid in uids}
        self._telemetry.silent_pods.set(len(self._failures))
        self.rounds += 1

    async def _ask_progress(self, session: aiohttp.ClientSession, gate: asyncio.Semaphore, target: Target) -> None:
        """A pod that starts may be silent: then nothing is known."""
        self._progress.pop(target.uid, None)
        async with gate:
            with contextlib.suppress(TimeoutError, ScrapeError, aiohttp.ClientError, OSError, UnicodeDecodeError):
                async with asyncio.timeout(self._settings.timeout_seconds):
                    percent = parse_progress(await self._fetch(session, target))
                if percent is not None:
                    self._progress[target.uid] = percent

    async def _scrape_one(self, session: aiohttp.ClientSession, gate: asyncio.Semaphore, target: Target) -> None:
        async with gate:
            try:
                async with asyncio.timeout(self._settings.timeout_seconds):
                    text = await self._fetch(session, target)
                self._samples[target.uid] = parse_sample(text, time=self._clock())
                self._failures.pop(target.uid, None)
            except TimeoutError:
                self._failures[target.uid] = f"no metrics within {self._settings.timeout_seconds:g} s"
            except (ScrapeError, aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
                self._failures[target.uid] = shorten(str(error) or type(error).__name__, 200)

    async def _fetch(self, session: aiohttp.ClientSession, target: Target) -> str:
        async with session.get(target.url, allow_redirects=False) as response:
            if response.status != 200:
                raise ScrapeError(f"/metrics answered {response.status}")
            parts: list[bytes] = []
            size = 0
            async for chunk in response.content.iter_chunked(16 * 1024):
                size += len(chunk)
                if size > self._settings.max_bytes:
                    response.close()
                    raise ScrapeError(f"/metrics is longer than {self._settings.max_bytes} bytes")
                parts.append(chunk)
            return b"".join(parts).decode()
