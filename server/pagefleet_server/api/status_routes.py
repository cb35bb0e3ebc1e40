"""Health, metrics, models, version and drain. All answer at once, whatever the engine does."""

import ipaddress
from importlib.metadata import version

from aiohttp import web

from pagefleet_server.api.errors import ForbiddenError
from pagefleet_server.api.openapi import make_openapi
from pagefleet_server.api.service import SERVICE, Service
from pagefleet_server.client.errors import EngineError


async def get_livez(request: web.Request) -> web.Response:
    """503 when the engine is dead or hangs: restart the pod. A starting or draining server lives."""
    service = request.app[SERVICE]
    if service.client.dead is not None:
        return _state(503, "dead", service.client.dead.reason)
    if service.stalled:
        age = service.client.last_message_age_seconds
        return _state(503, "stalled", f"work is there and the engine has been silent for {age:.1f} s")
    return _state(200, "alive", _phase(service))


async def get_readyz(request: web.Request) -> web.Response:
    """200 when new requests are welcome."""
    service = request.app[SERVICE]
    return _state(200, "ready", "") if service.accepts else _state(503, "not ready", _phase(service))


async def get_health(request: web.Request) -> web.Response:
    """vLLM's: 200 when the model is loaded and the engine works."""
    service = request.app[SERVICE]
    healthy = service.loaded is not None and service.client.dead is None and not service.stalled
    return _state(200, "healthy", "") if healthy else _state(503, "not healthy", _phase(service))


async def get_startupz(request: web.Request) -> web.Response:
    """200 once a warm-up has run; until then the phase."""
    service = request.app[SERVICE]
    if service.loaded is not None and service.client.dead is None:
        return _state(200, "started", "")
    answer: dict[str, object] = {"status": "starting", "detail": _phase(service)}
    if service.download is not None:
        done, total = service.download.done_bytes, service.download.total_bytes
        answer["download"] = {"done_bytes": done, "total_bytes": total}
    loading = service.client.loading
    if loading is not None:
        answer["load"] = {"done_bytes": loading.done_bytes, "total_bytes": loading.total_bytes}
    return web.json_response(answer, status=503)


async def get_metrics(request: web.Request) -> web.Response:
    """Prometheus text; `?name[]=` picks families."""
    text = request.app[SERVICE].metrics.render(request.query.getall("name[]", ()))
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def get_models(request: web.Request) -> web.Response:
    """The one served model."""
    service = request.app[SERVICE]
    return web.json_response({"object": "list", "data": [_model(service)]})


async def get_model(request: web.Request) -> web.Response:
    """The same, by name."""
    service = request.app[SERVICE]
    service.check_model(request.match_info["model"])
    return web.json_response(_model(service))


async def get_version(request: web.Request) -> web.Response:
    """Of this server, and which kernels it computes with; null until the engine is ready."""
    ready = request.app[SERVICE].client.ready
    backends = {
        "attention_backend": None if ready is None else ready.attention_backend,
        "linear_backend": None if ready is None else ready.linear_backend,
    }
    return web.json_response({"version": version("pagefleet")} | backends)


async def get_openapi(request: web.Request) -> web.Response:
    """Description of this API."""
    root_path = request.app[SERVICE].settings.http.root_path
    return web.json_response(make_openapi(version=version("pagefleet"), root_path=root_path))


async def post_reset_prefix_cache(request: web.Request) -> web.Response:
    """No request after this one finds blocks that are cached now; running ones keep theirs. For whom /drain is, too."""
    service = _service_for_admin(request)
    try:
        service.client.reset_prefix_cache()
    except EngineError as error:
        raise service.explain(error) from error
    return web.json_response({"reset": True})


async def post_drain(request: web.Request) -> web.Response:
    """As SIGTERM; for loopback peers (a preStop hook, the pod itself) and keys marked `admin`."""
    service = _service_for_admin(request)
    service.begin_drain()
    http = service.settings.http
    return web.json_response(
        {
            "draining": True,
            "delay_seconds": http.drain_delay_seconds,
            "timeout_seconds": http.drain_timeout_seconds,
            "open_requests": service.num_open,
        },
        status=202,
    )


def _service_for_admin(request: web.Request) -> Service:
    """A browser on this machine is a loopback peer for any page that it shows, and sends that page's Origin."""
    service = request.app[SERVICE]
    is_local = _is_loopback(request.remote) and "Origin" not in request.headers
    if not is_local and not _has_admin_key(request, service):
        raise ForbiddenError(f"{request.path} is only answered to loopback peers, no pages, and to keys marked admin")
    return service


def _model(service: Service) -> dict[str, object]:
    loaded = service.require()
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "pagefleet",
        "root": service.settings.engine.model.model,
        "parent": None,
        "max_model_len": loaded.ready.max_model_len,
        "default_sampling_params": dict(loaded.defaults),
    }


def _phase(service: Service) -> str:
    if service.client.dead is not None:
        return f"engine dead: {service.client.dead.reason}"
    if service.stalled:
        return "engine stalled"
    if service.drain.active:
        return "draining"
    if service.loaded is not None:
        return "serving"
    starting = service.client.starting
    if starting is None and service.download is not None and not service.download.finished:
        return f"Downloading: {service.download}"
    return "starting" if starting is None else f"{starting.phase}: {starting.message}"


def _state(status: int, state: str, detail: str) -> web.Response:
    return web.json_response({"status": state, "detail": detail}, status=status)


def _has_admin_key(request: web.Request, service: Service) -> bool:
    tenant = None if service.keys is None else service.keys.identify(request.headers.get("Authorization"))
    return tenant is not None and tenant.quota.limits.admin


def _is_loopback(peer: str | None) -> bool:
    """Also for IPv4 peers of an IPv6 socket."""
    if peer is None:
        return False
    address = ipaddress.ip_address(peer.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
