"""`make demo`."""

import signal
import sys


def main() -> int:
    """The exit code: 0 when everything was shown."""
    # Loading takes a second, and the demo handles signals only then: until then Ctrl-C ends it without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import asyncio

    from demo.main_job import show

    return asyncio.run(show())


if __name__ == "__main__":
    sys.exit(main())
