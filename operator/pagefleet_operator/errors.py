"""The operator's own errors, one tree per boundary."""

MAX_FOREIGN_TEXT = 512
"""Characters of other people's text that we pass on, at most."""


def shorten(text: str, limit: int = MAX_FOREIGN_TEXT) -> str:
    """`text` on one line and at most `limit` characters long."""
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


class OperatorError(Exception):
    """Base of everything this package raises on purpose."""


class TooOldError(OperatorError):
    """The API server lacks what this operator needs."""


class SpecError(OperatorError):
    """A spec that cannot be honoured. `problems` holds one "field: what, value, bound" each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class ApiError(OperatorError):
    """The API server refused or failed. status 0: it could not be reached."""

    def __init__(self, *, status: int, reason: str, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(f"{status} {reason}: {message}" if status else f"{reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = shorten(message)
        self.retry_after_seconds = retry_after_seconds
        self.child: str | None = None
        """Kind of the child that was refused, where it is one."""

    @property
    def is_transient(self) -> bool:
        """Whether the same request may pass later without anyone changing anything."""
        return self.status in (0, 408, 409, 425, 429) or self.status >= 500


class ScrapeError(OperatorError):
    """A pod's metrics could not be had or not be believed; the text says why."""
