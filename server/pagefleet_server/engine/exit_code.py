"""Exit codes of the engine process: what the pod's log and the API process report."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Documented in docs/engine.md; other numbers never leave the engine (a negative code is a signal)."""

    STOPPED = 0
    """The API asked for it."""
    USAGE = 2
    """Arguments or settings are not valid."""
    BAD_MODEL = 3
    """The model is not there, cannot be read, is not supported or does not fit; trying again will not help."""
    START_FAILED = 4
    """Anything else on the way to ready."""
    STEP_FAILED = 5
    """An exception in a step; the KV cache cannot be trusted any more."""
    API_GONE = 6
    """The API process closed the socket, or took nothing from it for too long."""

    @property
    def meaning(self) -> str:
        """Words for a log line."""
        return {
            ExitCode.STOPPED: "stopped on request",
            ExitCode.USAGE: "arguments or settings are not valid",
            ExitCode.BAD_MODEL: "the model cannot be served",
            ExitCode.START_FAILED: "the start-up failed",
            ExitCode.STEP_FAILED: "a step failed",
            ExitCode.API_GONE: "the API process is gone",
        }[self]


def describe_exit(return_code: int) -> str:
    """`exit code 3 (the model cannot be served)` or `signal 9`, for a code as subprocess gives it."""
    if return_code < 0:
        return f"signal {-return_code}"
    try:
        return f"exit code {return_code} ({ExitCode(return_code).meaning})"
    except ValueError:
        return f"exit code {return_code}"
