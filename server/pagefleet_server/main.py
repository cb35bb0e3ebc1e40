"""Entry point of `pagefleet-server`."""

import asyncio
import contextlib
import logging
import os
import resource
import sys
from typing import NoReturn

import uvloop

from pagefleet_server.api.server import ExitCode, Server
from pagefleet_server.cli import BadSettingError, parse_settings
from pagefleet_server.log import configure_logging


def main() -> None:
    """Parse, serve, exit with an ExitCode."""
    try:
        settings = parse_settings(sys.argv[1:], os.environ)
    except BadSettingError as error:
        sys.stderr.write(f"pagefleet-server: {error}\n")
        sys.exit(ExitCode.USAGE)
    configure_logging()
    serve(Server(settings))


def allow_open_files() -> None:
    """As many as the system lets us: each stream is one, and the usual soft limit of 1024 would refuse clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):  # then it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(server: Server) -> NoReturn:
    """Run it and end the process with its exit code.

    At once: closing the loop would give SIGTERM its default action back, and a second one that comes while the
    interpreter winds down would turn a clean drain into a death by signal.
    """
    allow_open_files()
    code = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(server.run())
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
