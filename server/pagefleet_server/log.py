"""The server's log: plain lines on stderr."""

import logging

LOGGER = logging.getLogger("pagefleet.server")
ACCESS_LOGGER = logging.getLogger("pagefleet.access")
HTTP_LOGGER = logging.getLogger("pagefleet.http")
"""What aiohttp has to say: connections, and bytes that are no HTTP."""
MAX_REASON_CHARS = 200


def configure_logging() -> None:
    """One format for the whole process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")


def tell_in_one_line(*faults: type[BaseException]) -> logging.Filter:
    """A filter under which these exceptions are an INFO line without traceback: they are the client's doing, and a
    stack of the HTTP library for each would let anybody fill the log."""

    class OneLine(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            error = record.exc_info[1] if record.exc_info else None
            if isinstance(error, faults):
                reason = " ".join(str(error).split())[:MAX_REASON_CHARS]
                record.msg, record.args = f"{record.getMessage()}: {reason!a}", ()
                record.exc_info = record.exc_text = None
                record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
            return True

    return OneLine()
