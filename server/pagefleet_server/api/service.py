"""What every handler needs, and the door: who may come in now."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from aiohttp import web

from pagefleet_server.api.admission import Room, count_excess
from pagefleet_server.api.api_keys import ApiKeys
from pagefleet_server.api.cors import Cors
from pagefleet_server.api.drain import Drain
from pagefleet_server.api.errors import ApiError, BadRequestError, NotFoundError, Refusal, UnavailableError
from pagefleet_server.api.gauges import GaugeView
from pagefleet_server.api.lengths import TOO_LONG
from pagefleet_server.api.metrics import Metrics
from pagefleet_server.api.protocol.fields import UnknownFields
from pagefleet_server.api.text_model import LongTextsError, TextModel
from pagefleet_server.api.tracing import RequestTrace, Tracing
from pagefleet_server.api.tracker import Tracker
from pagefleet_server.api.turns import Turns
from pagefleet_server.client.engine_client import EngineClient
from pagefleet_server.client.errors import EngineDeadError, EngineError, RequestFailedError, RequestRefusedError
from pagefleet_server.client.request_stream import RequestStream
from pagefleet_server.grammar_limits import TOO_COMPLEX
from pagefleet_server.models.download import Progress
from pagefleet_server.settings import ServerSettings
from pagefleet_server.wire import Ready

STARTING_RETRY_SECONDS = 5
HANDLED_AT_ONCE = 2
"""Requests that are begun in one turn of the event loop; each takes up to a millisecond, and a probe some turns."""
MAX_WHOLE_BODIES = 64
"""So many bodies of the largest size may be read at once, or more smaller ones."""
ELSEWHERE_RETRY_SECONDS = 1
"""Draining or dead: another replica answers at once."""


class DrainExpiredError(EngineError):
    """The drain's time is over and this request is not."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Engine and text side are both there."""

    ready: Ready
    text: TextModel
    defaults: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Sampling of requests that do not say, see generation_defaults."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Of requests that were let in."""

    time: float
    """Clock seconds."""
    on_sent: Callable[[int], None] = lambda _: None
    """Tell it how many have gone to the engine: these no longer count as arriving."""


class Service:
    """One served model. Created before anything is loaded; `loaded` is set when it can answer."""

    def __init__(
        self,
        settings: ServerSettings,
        *,
        model_name: str,
        client: EngineClient,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
        keys: ApiKeys | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.settings = settings
        self.model_name = model_name
        self.client = client
        self.clock = clock
        self.wall_clock = wall_clock
        self.keys = keys
        """None: everybody may ask."""
        self.tracing = tracing
        """None: no traces."""
        self.created = int(wall_clock())
        self.loaded: Loaded | None = None
        self.download: Progress | None = None
        """Of a model of a hub; None for one of this machine."""
        self.drain = Drain(
            delay_seconds=settings.http.drain_delay_seconds,
            timeout_seconds=settings.http.drain_timeout_seconds,
            clock=clock,
        )
        self.metrics = Metrics(model_name, self.view)
        self.tracker = Tracker(self.metrics, clock=clock)
        self.cors = Cors(settings.http.cors_allow_origins)
        self.unknown_fields = UnknownFields()
        self.turns = Turns(HANDLED_AT_ONCE)
        """Of everything but probes."""
        self.open_streams: dict[str, RequestStream] = {}
        """Engine requests that have not ended."""
        self._body_bytes = 0
        self.num_open = 0
        """Generation requests whose handler has not ended."""
        self.idle = asyncio.Event()
        """Set while num_open is 0."""
        self.idle.set()
        self.drain_begun = asyncio.Event()

    @property
    def room(self) -> Room:
        """Bounds of admission."""
        return Room(self.settings.http.max_queue, self.settings.engine.scheduler.max_num_seqs)

    @property
    def stalled(self) -> bool:
        """Work is there and the engine has been silent for too long."""
        client = self.client
        silent = client.last_message_age_seconds > self.settings.http.stall_seconds
        return self.loaded is not None and client.dead is None and client.has_work and silent

    @property
    def accepts(self) -> bool:
        """What /readyz says. Overload never turns it off."""
        return self.loaded is not None and self.client.dead is None and not self.drain.active and not self.stalled

    def require(self) -> Loaded:
        """The loaded model. Raises UnavailableError while it starts, refuses or is dead."""
        if self.drain.refuses:
            # First: at its very end the engine has been stopped, which is no death.
            raise self._refuse(
                "draining", "this replica is shutting down; another one answers", ELSEWHERE_RETRY_SECONDS
            )
        if self.client.dead is not None:
            raise self._refuse("engine_dead", f"the engine is dead: {self.client.dead.reason}", ELSEWHERE_RETRY_SECONDS)
        if self.loaded is None:
            raise self._refuse("starting", "the model is still being loaded; see /startupz", STARTING_RETRY_SECONDS)
        return self.loaded

    def require_texts(self) -> Loaded:
        """The same, of a model that makes texts. Raises BadRequestError for an embedding model."""
        loaded = self.require()
        if loaded.ready.pooling is not None:
            raise BadRequestError(
                f"{self.model_name!r} makes embeddings, no texts; use /v1/embeddings", param="model", code="no_texts"
            )
        return loaded

    def _refuse(self, reason: str, message: str, retry_after_seconds: int) -> UnavailableError:
        self.metrics.rejected(reason)
        return UnavailableError(Refusal(reason, message, retry_after_seconds))

    @contextmanager
    def open_request(self) -> Iterator[None]:
        """A drain waits for what is inside."""
        self.num_open += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if self.num_open == 0:
                self.idle.set()

    @contextmanager
    def admit(self, num_requests: int) -> Iterator["Arrival"]:
        """Count `num_requests` as waiting until all are sent. Raises UnavailableError or BadRequestError when there
        can never be room."""
        if num_requests > self.room.most:
            raise BadRequestError(
                f"{num_requests} outputs were asked for at once (prompts times n); at most {self.room.most} fit into "
                "the queue and the batch together"
            )
        excess = count_excess(self.tracker.load, self.room, num_requests)
        if excess:
            raise self._refuse(
                "queue_full",
                f"{self.tracker.num_waiting} requests wait and at most {self.room.max_queue} may; try again later",
                self.tracker.rate.seconds_for(excess),
            )
        key = object()
        arrival = Arrival(self.tracker.arrive(key, num_requests), lambda count: self.tracker.left_door(key, count))
        try:
            with self.mind_long_texts():
                yield arrival
        except BadRequestError as error:
            if error.code == TOO_LONG:
                self.metrics.rejected("too_long")
            raise
        finally:
            self.tracker.left_door(key)

    @contextmanager
    def mind_long_texts(self) -> Iterator[None]:
        """Raises UnavailableError when the text model has enough to do."""
        try:
            yield
        except LongTextsError as error:
            raise self._refuse("queue_full", str(error), self.tracker.rate.seconds_for(1)) from error

    @contextmanager
    def reading_body(self) -> Iterator[Callable[[int], None]]:
        """Call what it gives with the size of each piece of a body. It raises UnavailableError when all bodies that
        are being read have too many bytes together."""
        held = 0

        def hold(num_bytes: int) -> None:
            nonlocal held
            held += num_bytes
            self._body_bytes += num_bytes
            if self._body_bytes > MAX_WHOLE_BODIES * self.settings.http.max_body_bytes:
                raise self._refuse("queue_full", "too many large bodies are being read; try again later", 1)

        try:
            yield hold
        finally:
            self._body_bytes -= held

    def check_queued_tokens(self, num_new: int) -> None:
        """Whether so many more prompt tokens may wait. Raises UnavailableError."""
        most, queued = self.settings.http.max_queue_tokens, self.tracker.num_queued_tokens
        if most and queued and queued + num_new > most:
            share = (queued + num_new - most) / queued  # of what waits must go first
            raise self._refuse(
                "queue_tokens",
                f"{queued} prompt tokens wait and at most {most} may; this request has {num_new}; try again later",
                self.tracker.rate.seconds_for(math.ceil(share * max(1, self.tracker.num_waiting))),
            )

    def refuse_after_wait(self) -> UnavailableError:
        """For a request that has waited for too long."""
        return self._refuse(
            "queue_timeout",
            f"no step came to this request within {self.settings.http.queue_timeout_seconds:g} s; try again later",
            self.tracker.rate.seconds_for(max(1, self.tracker.num_waiting)),
        )

    def check_model(self, name: str | None) -> None:
        """Raises NotFoundError for another model's name."""
        if name is not None and name != self.model_name:
            raise NotFoundError(
                f"the model {name[:200]!r} is not served here; this is {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def explain(self, error: EngineError) -> ApiError:
        """A failed engine call as an answer."""
        if isinstance(error, RequestRefusedError):
            return BadRequestError(str(error))
        if isinstance(error, RequestFailedError) and str(error).startswith(TOO_COMPLEX):
            return BadRequestError(str(error), code="invalid_grammar")
        if isinstance(error, RequestFailedError):
            return ApiError(str(error), code="request_failed")
        if isinstance(error, DrainExpiredError):
            return UnavailableError(Refusal("draining", str(error), ELSEWHERE_RETRY_SECONDS))
        if isinstance(error, EngineDeadError):
            return UnavailableError(Refusal("engine_dead", f"the engine died: {error.reason}", ELSEWHERE_RETRY_SECONDS))
        return UnavailableError(Refusal("starting", str(error), STARTING_RETRY_SECONDS))

    def end_streams(self, error: EngineError) -> None:
        """What was received is still delivered, then everyone gets the error."""
        for stream in self.open_streams.values():
            stream.fail(error)

    def begin_drain(self) -> None:
        """From SIGTERM or /drain; more than once is as good as once."""
        if self.drain.begin():
            self.drain_begun.set()

    def view(self) -> GaugeView:
        """Gauges of this moment."""
        tracker, gauges, ready = self.tracker, self.tracker.gauges, self.client.ready
        loading = self.client.loading
        common = GaugeView(
            waiting=tracker.num_waiting,
            blocks_waiting=tracker.blocks_waiting,
            tokens_waiting=tracker.num_queued_tokens,
            oldest_waiting_seconds=tracker.oldest_waiting_seconds,
            report_age_seconds=self.client.last_message_age_seconds,
            draining=self.drain.active,
            block_size=self.settings.engine.cache.block_size,
            attention_backend="" if ready is None else ready.attention_backend,
            linear_backend="" if ready is None else ready.linear_backend,
            start_seconds={} if ready is None else ready.start_seconds,
            download_done_bytes=0 if self.download is None else self.download.done_bytes,
            download_total_bytes=0 if self.download is None else self.download.total_bytes,
            load_done_bytes=0 if loading is None else loading.done_bytes,
            load_total_bytes=0 if loading is None else loading.total_bytes,
        )
        return common if gauges is None else common.with_engine(gauges)


SERVICE = web.AppKey("service", Service)
TENANT = web.RequestKey("tenant", str)
"""Whose request it is; there only when keys are asked for. Tenants share a full engine equally, and no cache."""
TRACE = web.RequestKey("trace", RequestTrace)
"""The request's span; there only when traces are made."""
