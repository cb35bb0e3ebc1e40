"""The server's log: plain lines on stderr."""

import logging
import re

LOGGER = logging.getLogger("pagefleet.server")
ACCESS_LOGGER = logging.getLogger("pagefleet.access")
HTTP_LOGGER = logging.getLogger("pagefleet.http")
"""What aiohttp has to say: connections, and bytes that are no HTTP."""
MAX_REASON_CHARS = 200
QUOTED = re.compile(r"""[:\s]*(?:bytearray\()?(?<!\w)b?['"](?![A-Za-z-]{1,40}['"] ).*""", re.DOTALL)
"""Bytes or text at the end of what the HTTP library says; the name of a header within it is none."""


def configure_logging() -> None:
    """One format for the whole process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")


def name_fault(said: str) -> str:
    """What the HTTP library says of bytes that are no HTTP, without the bytes: they may be a key, or a prompt."""
    words = " ".join(said.split())
    return QUOTED.sub("", re.sub(r"^\d{3}, message: ?", "", words))[:MAX_REASON_CHARS]


def tell_in_one_line(*faults: type[BaseException]) -> logging.Filter:
    """A filter under which these exceptions are an INFO line without traceback: they are the client's doing, and a
    stack of the HTTP library for each would let anybody fill the log."""

    class OneLine(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            error = record.exc_info[1] if record.exc_info else None
            if isinstance(error, faults):
                reason = name_fault(str(error))
                record.msg, record.args = f"{record.getMessage()}: {reason!a}", ()
                record.exc_info = record.exc_text = None
                record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
            return True

    return OneLine()
