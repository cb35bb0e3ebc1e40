"""What the server does first."""

import asyncio
import subprocess
import sys

import pytest

from pagefleet_server import main
from pagefleet_server.api import server
from pagefleet_server.api.exit_code import ExitCode
from pagefleet_server.settings import EngineSettings, ModelSettings, ServerSettings

BEFORE_THE_ENGINE = """
import asyncio, sys
from pagefleet_server import main
from pagefleet_server.settings import EngineSettings, ModelSettings, ServerSettings

class Client:
    def __init__(self, settings): pass
    async def start(self):
        print([name for name in HEAVY if name in sys.modules])
        raise SystemExit
    async def stop(self, timeout_seconds): print("stopped")

HEAVY = ("torch", "transformers", "aiohttp", "pydantic", "tokenizers", "prometheus_client", "llguidance", "jinja2")
main.EngineClient = Client
asyncio.run(main.serve(ServerSettings(EngineSettings(ModelSettings("/")))))
"""


def test_nothing_that_takes_long_is_imported_before_the_engine_starts() -> None:
    command = [sys.executable, "-c", BEFORE_THE_ENGINE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split("\n") == ["[]", "stopped", ""]


def test_the_engine_of_a_model_that_is_not_here_waits_for_its_download(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    class Client:
        def __init__(self, settings: EngineSettings) -> None:
            self.model = settings.model.model

        async def start(self) -> None:
            started.append(self.model)

        async def stop(self, timeout_seconds: float) -> None:
            """Nothing runs."""

    class FakeServer:
        def __init__(self, settings: ServerSettings, *, make_client: object) -> None:
            pass

        async def run(self) -> ExitCode:
            return ExitCode.OK

    monkeypatch.setattr(main, "EngineClient", Client)
    monkeypatch.setattr(server, "Server", FakeServer)
    for model in ("org/name", "hf://org/name", "hf://not a name", "/some/folder"):
        assert asyncio.run(main.serve(ServerSettings(EngineSettings(ModelSettings(model))))) is ExitCode.OK
    assert started == ["/some/folder"]
