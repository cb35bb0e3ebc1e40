"""Errors as Kubernetes words them: one exception that knows its `Status` object."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One fault of an invalid object."""

    field: str
    """Path as clients see it, such as `spec.template.spec.containers[0].image`."""
    message: str
    """Text after the path, such as `Required value`."""
    reason: str = "FieldValueInvalid"
    """Machine-readable kind of fault."""


class ApiError(Exception):
    """An answer that is not a success: HTTP code, reason, message and details of a `Status`."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details
        self.headers = headers or {}

    def status(self) -> dict[str, Any]:
        """The `Status` object of this error."""
        body: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
        }
        if self.reason:
            body["reason"] = self.reason
        if self.details is not None:
            body["details"] = self.details
        body["code"] = self.code
        return body


def qualified(plural: str, group: str) -> str:
    """`deployments.apps`, or `pods` for the core group."""
    return f"{plural}.{group}" if group else plural


def _details(name: str, group: str, kind: str) -> dict[str, Any]:
    details = {"name": name}
    if group:
        details["group"] = group
    return {**details, "kind": kind}


def bad_request(message: str) -> ApiError:
    """400: the request cannot be understood."""
    return ApiError(400, "BadRequest", message)


def wrong_version(found: object, expected: str) -> ApiError:
    """400: an object of another version than the path's."""
    return bad_request(f"the API version in the data ({found}) does not match the expected API version ({expected})")


def not_found(plural: str, group: str, name: str) -> ApiError:
    """404: no such object."""
    return ApiError(
        404, "NotFound", f'{qualified(plural, group)} "{name}" not found', details=_details(name, group, plural)
    )


def already_exists(plural: str, group: str, name: str) -> ApiError:
    """409: the name is taken."""
    text = f'{qualified(plural, group)} "{name}" already exists'
    return ApiError(409, "AlreadyExists", text, details=_details(name, group, plural))


def conflict(plural: str, group: str, name: str, why: str = "") -> ApiError:
    """409: the object has changed since it was read."""
    why = why or "the object has been modified; please apply your changes to the latest version and try again"
    text = f'Operation cannot be fulfilled on {qualified(plural, group)} "{name}": {why}'
    return ApiError(409, "Conflict", text, details=_details(name, group, plural))


def invalid(kind: str, group: str, name: str, causes: Sequence[Cause]) -> ApiError:
    """422: the object breaks its rules; every fault is a cause."""
    faults = list(dict.fromkeys(f"{cause.field}: {cause.message}" for cause in causes))
    text = faults[0] if len(faults) == 1 else f"[{', '.join(faults)}]"
    details = _details(name, group, kind)
    details["causes"] = [{"reason": c.reason, "message": c.message, "field": c.field} for c in causes]
    return ApiError(422, "Invalid", f'{qualified(kind, group)} "{name}" is invalid: {text}', details=details)


def invalid_options(kind: str, causes: Sequence[Cause]) -> ApiError:
    """422: options of a request (ListOptions, DeleteOptions ...) that make no sense."""
    error = invalid(kind, "meta.k8s.io", "", causes)
    error.details = {key: value for key, value in (error.details or {}).items() if key != "name"}
    return error


def patch_rejected() -> ApiError:
    """422: a JSON patch whose test failed or whose path is missing (Kubernetes says no more than this)."""
    return ApiError(422, "Invalid", "the server rejected our request due to an error in our request", details={})


def forbidden(plural: str, group: str, name: str, why: str) -> ApiError:
    """403: not allowed."""
    who = f'{qualified(plural, group)} "{name}"' if name else qualified(plural, group)
    return ApiError(403, "Forbidden", f"{who} is forbidden: {why}", details=_details(name, group, plural))


def unsupported_media_type(accepted: Sequence[str]) -> ApiError:
    """415: a body in a format that this endpoint does not read."""
    text = f"the body of the request was in an unknown format - accepted media types include: {', '.join(accepted)}"
    return ApiError(415, "UnsupportedMediaType", text)


def not_acceptable(accepted: Sequence[str]) -> ApiError:
    """406: none of the formats that the client wants."""
    return ApiError(406, "NotAcceptable", f"only the following media types are accepted: {', '.join(accepted)}")


def method_not_allowed() -> ApiError:
    """405: the resource does not support this verb."""
    return ApiError(
        405, "MethodNotAllowed", "the server does not allow this method on the requested resource", details={}
    )


def too_large(most_bytes: int) -> ApiError:
    """413: an object that the storage does not take."""
    text = f"etcdserver: request is too large: an object may have {most_bytes} bytes"
    return ApiError(413, "RequestEntityTooLarge", text)


def expired(message: str) -> ApiError:
    """410: the wanted version has left the history."""
    return ApiError(410, "Expired", message)
