"""The server's log: plain lines on stderr."""

import logging

LOGGER = logging.getLogger("pagefleet.server")
ACCESS_LOGGER = logging.getLogger("pagefleet.access")


def configure_logging() -> None:
    """One format for the whole process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
