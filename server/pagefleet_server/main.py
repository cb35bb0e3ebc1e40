"""Entry point of `pagefleet-server`."""

import asyncio
import logging
import os
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


def serve(server: Server) -> NoReturn:
    """Run it and end the process with its exit code.

    At once: closing the loop would give SIGTERM its default action back, and a second one that comes while the
    interpreter winds down would turn a clean drain into a death by signal.
    """
    code = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(server.run())
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
