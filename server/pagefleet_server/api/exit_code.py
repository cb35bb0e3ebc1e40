"""How the server process ends."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Of the server process."""

    OK = 0
    """Drained."""
    FAILED = 1
    """The engine died, or the address cannot be listened on; the log says why."""
    USAGE = 2
    """A flag or variable has a wrong value."""
    BAD_MODEL = 3
    """The model is not there or cannot be served; starting again will not help."""
    INTERRUPTED = 130
    """SIGINT."""
