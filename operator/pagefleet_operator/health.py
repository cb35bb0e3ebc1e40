"""Our own health server: runs in leader and standby, and says what is wrong."""

import asyncio
from collections.abc import Callable, Mapping

from aiohttp import web

from pagefleet_operator.telemetry import Telemetry

Check = Callable[[], str | None]
"""What is wrong, or None."""

LAG_PERIOD_SECONDS = 0.5


class Health:
    """`/livez` fails when a check does, `/readyz` while starting, `/metrics` is Prometheus text."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._runner: web.AppRunner | None = None
        self._lag_task: asyncio.Task[None] | None = None
        self.checks: dict[str, Check] = {}
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
            self._telemetry.loop_lag_seconds.set(max(0.0, loop.time() - due))

    async def _livez(self, _: web.Request) -> web.Response:
        problems = self.problems()
        return web.json_response({"role": self.role, "problems": problems}, status=503 if problems else 200)

    async def _readyz(self, _: web.Request) -> web.Response:
        return web.json_response({"role": self.role}, status=503 if self.role == "starting" else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._telemetry.render(), content_type="text/plain", charset="utf-8")
