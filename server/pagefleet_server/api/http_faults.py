"""How bytes that are no HTTP are answered: as every other error, and without the bytes."""

from aiohttp import web
from aiohttp.web_request import BaseRequest

from pagefleet_server.api.errors import ErrorBody
from pagefleet_server.log import name_fault


def answer_faults_as_errors() -> None:
    """From now on in this process. No middleware sees such a request, and the library answers it with a plain text that
    repeats what it could not read and names the library's version; once is enough."""
    answer = web.RequestHandler.handle_error
    if answer.__module__ == __name__:
        return

    def handle_error(
        self: web.RequestHandler,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        answer(self, request, status, exc, message)  # logs it, and raises where an answer has begun
        kind = "invalid_request_error" if status < 500 else "internal_error"
        body = ErrorBody(name_fault(message or "") or "the request cannot be read", kind)
        response = web.Response(status=status, body=body.to_json(), content_type="application/json")
        response.headers["Server"] = "pagefleet"
        response.force_close()
        return response

    web.RequestHandler.handle_error = handle_error  # type: ignore[method-assign]  # the library has no other hook
