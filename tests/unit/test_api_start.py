"""What the server does first."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from pagefleet_server import main
from pagefleet_server.api import server
from pagefleet_server.api.exit_code import ExitCode
from pagefleet_server.client.engine_client import EngineClient
from pagefleet_server.settings import EngineSettings, HttpSettings, ModelSettings, ServerSettings
from support.api_server import write_letter_model

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
asyncio.run(main.serve(ServerSettings(EngineSettings(ModelSettings("/"))), make_client=Client))
"""


def test_nothing_that_takes_long_is_imported_before_the_engine_starts() -> None:
    command = [sys.executable, "-c", BEFORE_THE_ENGINE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split("\n") == ["[]", "stopped", ""]


@pytest.fixture
def own_signals() -> Iterator[None]:
    """serve() ends with SIGTERM and SIGINT ignored, which is right for a process that is about to end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, action in before.items():
        signal.signal(number, action)


class NoEngine(EngineClient):
    """An engine that is told to start, and does not."""

    started: ClassVar[list[str]] = []

    async def start(self, *, model_path: str | None = None) -> None:
        self.started.append(self._settings.model.model)


@pytest.mark.usefixtures("own_signals")
def test_the_engine_of_a_model_that_is_not_here_waits_for_its_download(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeServer:
        def __init__(self, settings: ServerSettings, *, client: object, signals: object) -> None:
            pass

        async def run(self) -> ExitCode:
            return ExitCode.OK

    NoEngine.started.clear()
    monkeypatch.setattr(server, "Server", FakeServer)
    for model in ("org/name", "hf://org/name", "hf://not a name", "/some/folder"):
        settings = ServerSettings(EngineSettings(ModelSettings(model)))
        assert asyncio.run(main.serve(settings, make_client=NoEngine)) is ExitCode.OK
    assert NoEngine.started == ["/some/folder"]


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(
    ("number", "want"), [(signal.SIGTERM, ExitCode.OK), (signal.SIGINT, ExitCode.INTERRUPTED)], ids=["TERM", "INT"]
)
def test_a_signal_that_comes_before_the_server_is_imported_ends_it(
    tmp_path: Path, number: signal.Signals, want: ExitCode
) -> None:
    """It had its default effect for half a second: a traceback, a death by signal, and none at all as a container's
    first process."""

    class Signalled(NoEngine):
        async def start(self, *, model_path: str | None = None) -> None:
            os.kill(os.getpid(), number)

    model = write_letter_model(tmp_path / "model")
    settings = ServerSettings(EngineSettings(ModelSettings(str(model))), HttpSettings(port=0))
    assert asyncio.run(main.serve(settings, make_client=Signalled)) is want


@pytest.mark.usefixtures("own_signals")
def test_an_engine_that_cannot_be_started_is_told_in_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Refused(NoEngine):
        async def start(self, *, model_path: str | None = None) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    settings = ServerSettings(EngineSettings(ModelSettings(str(tmp_path))))
    assert asyncio.run(main.serve(settings, make_client=Refused)) is ExitCode.FAILED
    assert "the engine process cannot be started: [Errno 24] Too many open files" in caplog.text


@pytest.mark.parametrize("closed", [(0,), (1, 2), (0, 1, 2)], ids=str)
def test_closed_standard_streams_are_put_in_place(closed: tuple[int, ...]) -> None:
    """A socket got the number 0, and the engine process lost it to its own stdin."""
    code = (
        "import os, sys; from pagefleet_server.main import open_standard_streams;"
        f" [os.close(number) for number in {closed}]; open_standard_streams();"
        " sys.exit(os.open('/dev/null', os.O_RDONLY) < 3)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("name", ["missing", "empty folder", "empty file"])
def test_a_model_that_cannot_be_served_is_told_once_in_the_last_line(tmp_path: Path, name: str) -> None:
    """Both processes read it, and each told what it found."""
    model = tmp_path / "model.gguf"
    if name == "empty folder":
        model.mkdir()
    elif name == "empty file":
        model.touch()
    command = [sys.executable, "-m", "pagefleet_server.main", "--port", "0", "--model", str(model)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == ExitCode.BAD_MODEL
    errors = [line for line in ended.stderr.splitlines() if " ERROR " in line]
    assert len(errors) == 1 and f"the model cannot be served: {model}: " in errors[0]
    assert errors == ended.stderr.splitlines()[-1:]


WITHOUT = """
import sys
sys.modules[{package!r}] = None  # as if it were not installed
sys.argv = ["pagefleet-server", "--model", "m"]
from pagefleet_server.command import main
main()
"""


@pytest.mark.parametrize("package", ["uvloop", "msgspec"])
def test_a_server_without_its_extra_says_which_to_install(package: str) -> None:
    command = [sys.executable, "-c", WITHOUT.format(package=package)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == ExitCode.USAGE
    (line,) = ended.stderr.splitlines()
    assert f"the package {package} is not installed" in line and "install pagefleet[server]" in line


INTERRUPTED = """
import os, signal, sys
class Interrupt:  # while the first of our modules is looked for
    def find_spec(self, name, path=None, target=None):
        if name == "pagefleet_server.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from pagefleet_server.command import main
main()
"""


def test_ctrl_c_while_modules_are_imported_shows_no_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")
