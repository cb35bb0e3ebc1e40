"""Entry point of `pagefleet-server`."""

import asyncio
import os
import sys

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
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(Server(settings).run()))


if __name__ == "__main__":
    main()
