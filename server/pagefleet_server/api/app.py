"""Routes, and what happens around every request: its id, its errors, its access log line, its connection."""

import json
import re
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from pagefleet_server.api import chat_route, completion_route, embedding_route, page_routes, status_routes, text_routes
from pagefleet_server.api.answering import USAGE
from pagefleet_server.api.errors import ApiError, ErrorBody, QuotaError, RefusedError, TornBodyError, UnauthorizedError
from pagefleet_server.api.generation import Usage
from pagefleet_server.api.load_report import REQUEST_HEADER, RESPONSE_HEADER, report_load
from pagefleet_server.api.service import SERVICE, TENANT, TRACE, Service
from pagefleet_server.api.whole_answer import OUTCOME
from pagefleet_server.log import ACCESS_LOGGER, LOGGER

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID = web.RequestKey("request_id", str)
REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
CLIENT_GONE_STATUS = 499
"""In the access log only: the client closed the connection before the answer."""
PROBES = frozenset({"/livez", "/readyz", "/startupz", "/health", "/metrics"})
"""Need no key, and are logged at debug level: they come every few seconds."""
KEYLESS = PROBES | {"/drain", "/reset_prefix_cache", "/"}
"""/drain and /reset_prefix_cache look at their caller themselves. The page is the same for everybody; what it asks for
needs a key."""


def make_app(service: Service) -> web.Application:
    """The whole HTTP surface."""
    http = service.settings.http
    app = web.Application(
        middlewares=[follow_request, answer_preflight, answer_errors, check_key], client_max_size=http.max_body_bytes
    )
    app[SERVICE] = service
    app.on_response_prepare.append(set_headers)
    for prefix in dict.fromkeys(("", http.root_path)):
        app.add_routes(make_routes(prefix))
        if http.web_page:
            app.add_routes(make_page_routes(prefix))
    return app


def make_routes(prefix: str) -> list[web.RouteDef]:
    """Every route, under a prefix."""
    return [
        web.post(f"{prefix}/v1/completions", count_open(completion_route.post_completions)),
        web.post(f"{prefix}/v1/chat/completions", count_open(chat_route.post_chat_completions)),
        web.post(f"{prefix}/v1/embeddings", count_open(embedding_route.post_embeddings)),
        web.post(f"{prefix}/tokenize", text_routes.post_tokenize),
        web.post(f"{prefix}/detokenize", text_routes.post_detokenize),
        web.get(f"{prefix}/tokenizer_info", text_routes.get_tokenizer_info),
        web.get(f"{prefix}/v1/models", status_routes.get_models),
        web.get(f"{prefix}/v1/models/{{model:.+}}", status_routes.get_model),
        web.get(f"{prefix}/version", status_routes.get_version),
        web.get(f"{prefix}/openapi.json", status_routes.get_openapi),
        web.get(f"{prefix}/health", status_routes.get_health),
        web.get(f"{prefix}/livez", status_routes.get_livez),
        web.get(f"{prefix}/readyz", status_routes.get_readyz),
        web.get(f"{prefix}/startupz", status_routes.get_startupz),
        web.get(f"{prefix}/metrics", status_routes.get_metrics),
        web.post(f"{prefix}/drain", status_routes.post_drain),
        web.post(f"{prefix}/reset_prefix_cache", status_routes.post_reset_prefix_cache),
    ]


def make_page_routes(prefix: str) -> list[web.RouteDef]:
    """The built-in page."""
    return [
        web.get(f"{prefix}/", page_routes.get_page),
        web.get(f"{prefix}/ui/{{file}}", page_routes.get_page),
    ]


def name_route(request: web.Request) -> str:
    """The path without the proxy's prefix."""
    root = request.app[SERVICE].settings.http.root_path
    return request.path.removeprefix(root) if root and request.path.startswith(f"{root}/") else request.path


def count_open(handler: Handler) -> Handler:
    """A drain waits for these."""

    async def counted(request: web.Request) -> web.StreamResponse:
        with request.app[SERVICE].open_request():
            return await handler(request)

    return counted


@web.middleware
async def follow_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request an id, and log one line when its handler has ended; never a word of the prompt."""
    service = request.app[SERVICE]
    given = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = given if REQUEST_ID_PATTERN.fullmatch(given) else uuid.uuid4().hex
    started = service.clock()
    status = CLIENT_GONE_STATUS
    is_probe = name_route(request) in PROBES
    resource = request.match_info.route.resource
    if service.tracing is not None and resource is not None and not is_probe:
        request[TRACE] = service.tracing.begin(request.method, resource.canonical, request.headers)
    try:
        if not is_probe:
            await service.turns.wait()
        response = await handler(request)
        status = response.status
        return response
    finally:
        usage = request.get(USAGE)
        line: dict[str, object] = {
            "method": request.method,
            "path": request.path[:200],
            "status": status,
            "ms": round((service.clock() - started) * 1000, 1),
            "request_id": request[REQUEST_ID],
        }
        if usage is not None:
            line["prompt_tokens"], line["completion_tokens"] = usage.prompt_tokens, usage.completion_tokens
        if OUTCOME in request:
            line["outcome"] = request[OUTCOME]
        if TRACE in request:
            line["trace_id"] = request[TRACE].trace_id
            request[TRACE].end(status, name_usage(service, usage))
        log = ACCESS_LOGGER.debug if is_probe else ACCESS_LOGGER.info
        log("%s", json.dumps(line))


def name_usage(service: Service, usage: Usage | None) -> dict[str, str | int]:
    """Attributes of a request's span."""
    if usage is None:
        return {}
    return {
        "gen_ai.request.model": service.model_name,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
    }


@web.middleware
async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A browser asks before it sends another origin's request; that question has no key and no route."""
    asked = request.headers.get("Access-Control-Request-Method")
    if request.method != "OPTIONS" or asked is None:
        return await handler(request)
    cors, origin = request.app[SERVICE].cors, request.headers.get("Origin")
    headers = cors.preflight_headers(origin, request.headers.get("Access-Control-Request-Headers"))
    return web.Response(status=204 if headers else 403, headers=headers)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The one place that maps errors to answers."""
    try:
        return await handler(request)
    except RefusedError as error:
        retry = {"Retry-After": str(error.refusal.retry_after_seconds)}
        return _error(error.status, error.body, retry)
    except UnauthorizedError as error:
        return _error(error.status, error.body, {"WWW-Authenticate": "Bearer"})
    except TornBodyError as error:
        return _last_error(error.status, error.body)
    except ApiError as error:
        return _error(error.status, error.body)
    except web.HTTPRequestEntityTooLarge:
        limit = request.app[SERVICE].settings.http.max_body_bytes
        return _last_error(413, ErrorBody(f"the body exceeds {limit} bytes", "invalid_request_error"))
    except web.HTTPMethodNotAllowed as error:
        body = ErrorBody(f"{request.method} is not allowed here", "invalid_request_error")
        return _error(error.status, body, {"Allow": ", ".join(sorted(error.allowed_methods))})
    except web.HTTPException as error:
        return _error(error.status, ErrorBody(f"{request.path[:200]}: {error.reason}", "invalid_request_error"))
    except Exception as error:  # a fault of ours: the client learns that, and nothing else
        if isinstance(error, ConnectionError) or request.writer.output_size > 0:
            raise  # a torn answer must not look whole
        LOGGER.exception("request %s failed", request[REQUEST_ID])
        message = f"the server failed; its log tells why under the request id {request[REQUEST_ID]}"
        return _error(500, ErrorBody(message, "internal_error", code="internal_error"))


@web.middleware
async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Paths that are not there need a key, too: nothing can be learned without one. What a key may send is limited."""
    service = request.app[SERVICE]
    route = name_route(request)
    if service.keys is None or route in KEYLESS or route.startswith("/ui/"):
        return await handler(request)
    tenant = service.keys.identify(request.headers.get("Authorization"))
    if tenant is None:
        raise UnauthorizedError("a valid API key is needed: Authorization: Bearer KEY")
    request[TENANT] = tenant.name
    if request.method != "POST":
        return await handler(request)
    try:
        with tenant.quota.spend():
            return await handler(request)
    except QuotaError as error:
        service.metrics.rejected(error.refusal.reason)
        raise


async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
    """The request's id; the load, when asked for; and `Connection: close` while this replica is leaving or has a queue,
    so that pooled clients look for another one."""
    service = request.app[SERVICE]
    response.headers["Server"] = "pagefleet"
    request_id = request.get(REQUEST_ID)
    if request_id is not None:
        response.headers["X-Request-Id"] = request_id
    response.headers.update(service.cors.answer_headers(request.headers.get("Origin")))
    form = request.headers.get(REQUEST_HEADER)
    if TRACE in request:
        response.headers["traceparent"] = request[TRACE].traceparent
    report = None if form is None else report_load(form, service.view())
    if report is not None:
        response.headers[RESPONSE_HEADER] = report
    if service.drain.active or service.tracker.load.waiting > 0:
        response.force_close()
        response.headers["Connection"] = "close"  # aiohttp has written its own headers before this hook


def _last_error(status: int, body: ErrorBody) -> web.Response:
    """Of its connection: the rest of the request is not read."""
    response = _error(status, body)
    response.force_close()
    return response


def _error(status: int, body: ErrorBody, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=body.to_json(), content_type="application/json", headers=headers)
