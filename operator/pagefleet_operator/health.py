"""Our own health server: runs in leader and standby, and says what is wrong."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from aiohttp import web

from pagefleet_operator.telemetry import Telemetry

Check = Callable[[], str | None]
"""What is wrong, or None."""

LAG_PERIOD_SECONDS = 0.5
MAX_LAG_SECONDS = 2.0
NUM_LAGS = 10
"""A loop that was later than MAX_LAG_SECONDS so many times running is stuck."""


class Health:
    """`/livez` fails when a check does, `/readyz` while starting, `/metrics` is Prometheus text."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._runner: web.AppRunner | None = None
        self._lag_task: asyncio.Task[None] | None = None
        self._lags: deque[float] = deque(maxlen=NUM_LAGS)
        self.checks: dict[str, Check] = {"loop": self.loop_problem}
        self.role = "starting"
        """starting, standby or leader."""

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port. Raises OSError when the address is taken."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        self._lag_task = asyncio.create_task(self._watch_lag(), name="loop lag")
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        """Stops listening."""
        if self._lag_task is not None:
            self._lag_task.cancel()
            await asyncio.gather(self._lag_task, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()

    def problems(self) -> Mapping[str, str]:
        """What is wrong, by check."""
        found = {name: check() for name, check in self.checks.items()}
        return {name: problem for name, problem in found.items() if problem is not None}

    async def _watch_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_PERIOD_SECONDS
            await asyncio.sleep(LAG_PERIOD_SECONDS)
            self.saw_lag(max(0.0, loop.time() - due))

    def saw_lag(self, seconds: float) -> None:
        """How late the loop was this time."""
        self._lags.append(seconds)
        self._telemetry.loop_lag_seconds.set(seconds)

    def loop_problem(self) -> str | None:
        """What is wrong when the loop has been late for long."""
        if len(self._lags) < NUM_LAGS or min(self._lags) <= MAX_LAG_SECONDS:
            return None
        return f"the event loop was at least {min(self._lags):.1f} s late {NUM_LAGS} times running"

    async def _livez(self, _: web.Request) -> web.Response:
        problems = self.problems()
        return web.json_response({"role": self.role, "problems": problems}, status=503 if problems else 200)

    async def _readyz(self, _: web.Request) -> web.Response:
        return web.json_response({"role": self.role}, status=503 if self.role == "starting" else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._telemetry.render(), content_type="text/plain", charset="utf-8")
