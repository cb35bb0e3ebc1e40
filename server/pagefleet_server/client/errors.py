"""What can go wrong between the API process and its engine."""


class EngineError(Exception):
    """Root of this boundary's errors."""


class EngineNotReadyError(EngineError):
    """The engine has not said Ready yet; answer 503."""


class EngineDeadError(EngineError):
    """The engine process ended (or its socket broke); nothing will come any more. The message says why."""

    def __init__(self, reason: str, *, return_code: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.return_code = return_code
        """As subprocess gives it (negative: signal); None when the process had not been reaped yet."""


class RequestFailedError(EngineError):
    """The model failed on this request; others go on. Answer 500."""


class RequestRefusedError(EngineError):
    """This request can never run here; the message has the numbers. Answer 400."""
