"""Entry point of `pagefleet-server`."""

import asyncio
import contextlib
import logging
import os
import resource
import sys
from collections.abc import Callable, Coroutine
from typing import NoReturn

import uvloop

from pagefleet_server.api.exit_code import ExitCode
from pagefleet_server.cli import BadSettingError, check_machine, misspelt_variables, parse_settings
from pagefleet_server.client.engine_client import EngineClient
from pagefleet_server.log import LOGGER, configure_logging
from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.hub import hub_model
from pagefleet_server.settings import EngineSettings, ServerSettings
from pagefleet_server.stop_signals import StopSignals


def main() -> None:
    """Parse, serve, exit with an ExitCode."""
    open_standard_streams()
    try:
        settings = parse_settings(sys.argv[1:], os.environ)
        check_machine(settings, num_cpus=os.cpu_count() or 1)
    except BadSettingError as error:
        sys.stderr.write(f"pagefleet-server: {error}\n")
        sys.exit(ExitCode.USAGE)
    configure_logging()
    for line in misspelt_variables(os.environ):
        LOGGER.warning("%s", line)
    run_to_end(serve(settings))


async def serve(
    settings: ServerSettings, *, make_client: Callable[[EngineSettings], EngineClient] = EngineClient
) -> ExitCode:
    """Serve, with the engine as the first thing that starts: it takes longest, and this process has much to import
    meanwhile. The engine of a model that a hub has yet to send waits for it."""
    with StopSignals().handled() as signals:
        client = make_client(settings.engine)
        try:
            if _is_here(settings.engine.model.model):
                try:
                    await client.start()
                except OSError as error:
                    LOGGER.error("the engine process cannot be started: %s; raise the limit that it names", error)
                    return ExitCode.FAILED
            from pagefleet_server.api.server import Server

            return await Server(settings, client=client, signals=signals).run()
        finally:
            await client.stop(timeout_seconds=0)


def _is_here(model: str) -> bool:
    try:
        return hub_model(model) is None
    except ModelError:
        return False  # told later, by who would download it


def open_standard_streams() -> None:
    """Where stdin, stdout or stderr was closed, put /dev/null: a socket that got such a number would be taken for one,
    in the engine process too."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def allow_open_files() -> None:
    """As many as the system lets us: each stream is one, and the usual soft limit of 1024 would refuse clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):  # then it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_to_end(serving: Coroutine[None, None, ExitCode]) -> NoReturn:
    """Run it and end the process with its exit code.

    At once: closing the loop would give SIGTERM its default action back, and a second one that comes while the
    interpreter winds down would turn a clean drain into a death by signal.
    """
    allow_open_files()
    code = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(serving)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
