"""HTTP verbs on resources: from request to the room that does it, and back."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp
from aiohttp import web

from pagefleet_localcluster.api import deletion, node_proxy, patches, pod_actions, reads, scale, writes
from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.errors import (
    ApiError,
    Cause,
    bad_request,
    invalid_options,
    method_not_allowed,
    not_found,
    unsupported_media_type,
)
from pagefleet_localcluster.api.request_info import Target, decode, decode_object
from pagefleet_localcluster.api.store import Stored
from pagefleet_localcluster.api.strategies import strategy_of
from pagefleet_localcluster.api.views import View, object_as_seen, render, render_list, view_of
from pagefleet_localcluster.api.watch_stream import stream_watch

Json = dict[str, Any]
JSON_PATCH, MERGE_PATCH = "application/json-patch+json", "application/merge-patch+json"
STRATEGIC_PATCH, APPLY_PATCH = "application/strategic-merge-patch+json", "application/apply-patch+yaml"
_CUSTOM_PATCHES = (JSON_PATCH, MERGE_PATCH, APPLY_PATCH)
_BUILTIN_PATCHES = (JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH, APPLY_PATCH)

WARNINGS = web.RequestKey("warnings", list[str])
"""Where a request keeps the texts of its Warning headers, whatever becomes of it."""
SUMMARY_CHARS = 30
MAX_SHOWN_CHARS = 10_000
"""How much of a body that says not what it is an error shows."""


class Handlers:
    """Serves one cluster's resources."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        self._cluster = cluster
        self._session = session

    async def handle(self, request: web.Request, target: Target) -> web.StreamResponse:
        """Answers a request for a resource. Raises ApiError."""
        resource = target.resource
        if target.subresource in ("log", "exec", "binding", "eviction") and resource.collection == ("", "pods"):
            return await self._pod_action(request, target)
        if target.subresource == "scale" and resource.scale:
            return await self._scale(request, target)
        if target.subresource and not (target.subresource == "status" and resource.has_status):
            raise ApiError(404, "NotFound", "the server could not find the requested resource", details={})
        match request.method:
            case "GET" | "HEAD":
                return await self._get(request, target)
            case "POST" if not target.name:
                return await self._create(request, target)
            case "PUT":
                return await self._update(request, target)
            case "PATCH":
                return await self._patch(request, target)
            case "DELETE":
                return await self._delete(request, target)
        raise method_not_allowed()

    async def _get(self, request: web.Request, target: Target) -> web.StreamResponse:
        resource, query = target.resource, request.query
        view = view_of(request.headers.get("Accept", ""), query.get("includeObject", ""))
        if target.name:
            stored = self._cluster.get(resource, target.key)
            if stored is None:
                raise not_found(resource.plural, resource.group, target.name)
            return _json(render(self._cluster, resource, stored, view))
        selection = reads.select(resource, target.namespace, dict(query))
        if query.get("watch", "").lower() in ("true", "1"):
            reads.check_watch(query)
            return await stream_watch(request, self._cluster, selection, view)
        page = reads.list_objects(self._cluster, selection, query)
        return _json(render_list(self._cluster, resource, page.items, page.meta, view))

    async def _create(self, request: web.Request, target: Target) -> web.Response:
        resource = target.resource
        if resource.namespaced and not target.namespace:
            raise method_not_allowed()
        options = write_options(request)
        body = await self._object(request, target)
        stored = writes.create(self._cluster, resource, target.namespace, body, options)
        return self._answer(request, target, stored, options, 201)

    async def _update(self, request: web.Request, target: Target) -> web.Response:
        if not target.name:
            raise bad_request("name must be provided")
        options = write_options(request, target.subresource)
        body = await self._object(request, target)
        stored = writes.update(self._cluster, target.resource, target.key, body, options)
        return self._answer(request, target, stored, options, 200)

    async def _object(self, request: web.Request, target: Target) -> Json:
        raw, kind = await request.read(), target.resource.kind
        found = decode_object(raw, request.headers.get("Content-Type", ""), kind)
        if target.resource.custom and not found.get("kind"):
            text = raw.decode(errors="replace")
            shown = text if len(text) <= SUMMARY_CHARS else f"{text[:SUMMARY_CHARS]} ..."
            why = f"Object 'Kind' is missing in '{text[:MAX_SHOWN_CHARS]}' ({shown})"
            raise bad_request(f"the object provided is unrecognized (must be of type {kind}): {why}")
        return found

    async def _patch(self, request: web.Request, target: Target) -> web.Response:
        if not target.name:
            raise method_not_allowed()
        resource, cluster = target.resource, self._cluster
        options = write_options(request, target.subresource)
        media = request.headers.get("Content-Type", "").partition(";")[0].strip()
        if media == APPLY_PATCH:
            if "fieldManager" not in request.query:
                text = "Required value: is required for apply patch"
                causes = [Cause(field="fieldManager", message=text, reason="FieldValueRequired")]
                raise invalid_options("PatchOptions", causes)
            body = decode_object(await request.read(), media, resource.kind, (APPLY_PATCH,))
            stored, created = writes.apply(cluster, resource, target.key, body, options)
            return self._answer(request, target, stored, options, 201 if created else 200)
        change = await self._change(request, target, media)
        stored = writes.patch(cluster, resource, target.key, lambda obj: change(object_as_seen(resource, obj)), options)
        return self._answer(request, target, stored, options, 200)

    async def _change(self, request: web.Request, target: Target, media: str) -> Callable[[Json], Any]:
        """The function that a patch body stands for. Raises ApiError 415 for a format that does not fit."""
        accepted = _CUSTOM_PATCHES if target.resource.custom else _BUILTIN_PATCHES
        if media not in accepted:
            raise unsupported_media_type(accepted)
        body = decode(await request.read(), media, target.resource.kind, accepted)
        if media == JSON_PATCH:
            return lambda obj: patches.json_patch(obj, body)
        if not isinstance(body, dict):
            raise bad_request(f"the body of a {media} must be an object, it is {type(body).__name__}")
        if media == MERGE_PATCH:
            return lambda obj: patches.merge_patch(obj, body)
        schema = target.resource.schema if target.subresource != "scale" else None
        return lambda obj: patches.strategic_patch(obj, body, schema)

    async def _delete(self, request: web.Request, target: Target) -> web.Response:
        resource, cluster = target.resource, self._cluster
        raw = await request.read()
        media = request.headers.get("Content-Type", "") or "application/json"
        body = decode_object(raw, media, "DeleteOptions") if raw.strip() else {}
        options = deletion.parse_delete_options(body, dict(request.query))
        if target.name:
            stored, gone = deletion.delete(cluster, resource, target.key, options)
            if gone and not strategy_of(resource).returns_deleted:
                return _json(_dump(_deleted(target, stored)))
            return self._answer(request, target, stored, None, 200)
        if "deletecollection" not in resource.verbs:
            raise method_not_allowed()
        selection = reads.select(resource, target.namespace, dict(request.query))
        page = reads.list_objects(cluster, selection, request.query)
        for stored in page.items:
            meta = stored.obj["metadata"]
            deletion.delete(cluster, resource, (meta.get("namespace", ""), meta["name"]), options)
        return _json(render_list(cluster, resource, page.items, page.meta, View()))

    async def _scale(self, request: web.Request, target: Target) -> web.Response:
        resource, cluster = target.resource, self._cluster
        stored = cluster.get(resource, target.key)
        if stored is None:
            raise not_found(resource.plural, resource.group, target.name)
        if request.method == "GET":
            return _json(_dump(scale.scale_of(resource, stored)))
        options = write_options(request, "scale")
        if request.method == "PUT":
            body = decode_object(await request.read(), request.headers.get("Content-Type", ""), "Scale")
        elif request.method == "PATCH":
            media = request.headers.get("Content-Type", "").partition(";")[0].strip()
            change = await self._change(request, target, media)
            body = change(scale.scale_of(resource, stored))
        else:
            raise method_not_allowed()
        changed = scale.set_scale(cluster, resource, target.key, body, options)
        return _json(_dump(scale.scale_of(resource, changed)), 200, options.warnings)

    async def _pod_action(self, request: web.Request, target: Target) -> web.StreamResponse:
        key, container = target.key, request.query.get("container", "")
        if target.subresource == "log" and request.method == "GET":
            url = node_proxy.node_url(self._cluster, key, "containerLogs", container)
            return await node_proxy.proxy_log(self._session, request, url)
        if target.subresource == "exec" and request.method in ("GET", "POST"):
            url = node_proxy.node_url(self._cluster, key, "exec", container)
            return await node_proxy.proxy_exec(self._session, request, url)
        if target.subresource in ("binding", "eviction") and request.method == "POST":
            kind = "Binding" if target.subresource == "binding" else "Eviction"
            body = decode_object(await request.read(), request.headers.get("Content-Type", ""), kind)
            action = pod_actions.bind if kind == "Binding" else pod_actions.evict
            return _json(_dump(action(self._cluster, target.resource, key, body)), 201)
        raise method_not_allowed()

    def _answer(
        self, request: web.Request, target: Target, stored: Stored, options: writes.WriteOptions | None, code: int
    ) -> web.Response:
        view = view_of(request.headers.get("Accept", ""), request.query.get("includeObject", ""))
        return _json(render(self._cluster, target.resource, stored, view), code, options.warnings if options else ())


def write_options(request: web.Request, subresource: str = "") -> writes.WriteOptions:
    """Options of a write from its query and headers. Raises ApiError 400 or 422."""
    query = request.query
    validation = query.get("fieldValidation", "") or "Warn"
    dry_run = query.getall("dryRun", [])
    causes = []
    if validation not in ("Strict", "Warn", "Ignore"):
        text = f'Unsupported value: "{validation}": supported values: "", "Ignore", "Strict", "Warn"'
        causes.append(Cause(field="fieldValidation", message=text, reason="FieldValueNotSupported"))
    if any(value != "All" for value in dry_run):
        text = f'Unsupported value: {json.dumps(dry_run)}: supported values: "All"'
        causes.append(Cause(field="dryRun", message=text, reason="FieldValueNotSupported"))
    if causes:
        kinds = {"PATCH": "PatchOptions", "PUT": "UpdateOptions"}
        raise invalid_options(kinds.get(request.method, "CreateOptions"), causes)
    agent = request.headers.get("User-Agent", "").partition("/")[0]
    warnings: list[str] = []
    request[WARNINGS] = warnings
    return writes.WriteOptions(
        warnings=warnings,
        manager=query.get("fieldManager") or agent or "unknown",
        subresource=subresource,
        field_validation=validation,
        dry_run=bool(dry_run),
        force=query.get("force", "").lower() in ("true", "1"),
    )


def _deleted(target: Target, stored: Stored) -> Json:
    details = {"name": target.name}
    if target.resource.group:
        details["group"] = target.resource.group
    details |= {"kind": target.resource.plural, "uid": stored.obj["metadata"]["uid"]}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}


def _dump(obj: Json) -> bytes:
    return json.dumps(obj, separators=(",", ":")).encode()


def _json(body: bytes, code: int = 200, warnings: Iterable[str] = ()) -> web.Response:
    return with_warnings(web.Response(body=body, status=code, content_type="application/json"), warnings)


def with_warnings(response: web.Response, warnings: Iterable[str]) -> web.Response:
    """The response with a Warning header for each text."""
    for text in warnings:
        quoted = text.replace("\\", "\\\\").replace('"', '\\"')
        response.headers.add("Warning", f'299 - "{quoted}"')
    return response
