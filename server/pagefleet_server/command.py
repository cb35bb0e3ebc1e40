"""What the console script `pagefleet-server` runs: minds ctrl-C and a missing extra before anything is imported."""

import signal
import sys

EXIT_USAGE = 2
"""ExitCode.USAGE, which cannot be imported yet."""


def main() -> None:
    """As main.main(), quietly."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own would show the import that it came into
    try:
        from pagefleet_server.main import main as serve
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "pagefleet_server":
            raise  # a fault of ours
        sys.stderr.write(
            f"pagefleet-server: the package {package} is not installed: the server comes with an extra of its own; "
            "install pagefleet[server]\n"
        )
        sys.exit(EXIT_USAGE)
    serve()
