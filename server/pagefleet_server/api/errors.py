"""What an answer that is no success says: OpenAI's error body, and the one place that maps causes to status codes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

MAX_MESSAGE_CHARS = 1000
MAX_SHOWN_FAULTS = 3


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """`{"error": {"message", "type", "param", "code"}}`."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None

    def to_json(self) -> bytes:
        """The document; foreign text is cut so that an error cannot echo a whole prompt."""
        message = self.message if len(self.message) <= MAX_MESSAGE_CHARS else self.message[:MAX_MESSAGE_CHARS] + " ..."
        error = {"message": message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


class ApiError(Exception):
    """Root of the errors that become an answer."""

    status = 500
    type = "internal_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or self.code

    @property
    def body(self) -> ErrorBody:
        """As the client sees it."""
        return ErrorBody(str(self), self.type, self.param, self.code)


class BadRequestError(ApiError):
    """400: this request can never be answered as it stands."""

    status = 400
    type = "invalid_request_error"


class TornBodyError(BadRequestError):
    """400, and nothing more can be read from this connection."""


class NotFoundError(ApiError):
    """404: no such model or path."""

    status = 404
    type = "invalid_request_error"


class UnauthorizedError(ApiError):
    """401: a key is needed, and this is none."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class DeadlineError(ApiError):
    """504: the answer was not complete in time."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class SlowBodyError(ApiError):
    """408: the body did not arrive in time."""

    status = 408
    type = "invalid_request_error"


class ForbiddenError(ApiError):
    """403: not from here."""

    status = 403
    type = "invalid_request_error"


class UnsupportedMediaTypeError(ApiError):
    """415: the body is not announced as JSON, or is packed."""

    status = 415
    type = "invalid_request_error"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the server has no room now; `reason` labels pagefleet_requests_rejected_total."""

    reason: str
    message: str
    retry_after_seconds: int = field(default=1)


class RefusedError(ApiError):
    """Not now: with Retry-After."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message, code=refusal.reason)
        self.refusal = refusal


class UnavailableError(RefusedError):
    """503 with Retry-After: try again, here or elsewhere."""

    status = 503
    type = "service_unavailable"


class QuotaError(RefusedError):
    """429 with Retry-After: this key has had its share for now."""

    status = 429
    type = "rate_limit_error"


REFUSAL_REASONS = (
    *("queue_full", "queue_tokens", "queue_timeout", "draining", "starting", "engine_dead"),
    *("rate_limit", "concurrency_limit", "too_long"),
)
"""Every label of pagefleet_requests_rejected_total; the two limits are 429, too_long is 400, the others are 503."""


def describe_validation(error: ValidationError) -> BadRequestError:
    """Pydantic's findings in one line, without the values: they may be a prompt."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    told = "; ".join(f"{name_field(fault['loc']) or 'body'}: {fault['msg']}" for fault in faults[:MAX_SHOWN_FAULTS])
    if len(faults) > MAX_SHOWN_FAULTS:
        told += f"; and {len(faults) - MAX_SHOWN_FAULTS} more"
    return BadRequestError(told, param=name_field(faults[0]["loc"]) or None)


def name_field(location: Sequence[Any]) -> str:
    """`("messages", 0, "content")` -> `messages[0].content`; the type names of a union are left out."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif str(part).isidentifier():
            name += f".{part}" if name else str(part)
    return name[:200]
