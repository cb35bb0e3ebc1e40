"""List and watch: selection, pages, and the stream of changes."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.errors import ApiError, Cause, bad_request, expired, invalid_options
from pagefleet_localcluster.api.resources import Resource
from pagefleet_localcluster.api.selectors import Predicate, parse_field_selector, parse_label_selector, predicate
from pagefleet_localcluster.api.store import Change, Name, Stored, freeze
from pagefleet_localcluster.api.views import object_as_seen

Json = dict[str, Any]
_BOOKMARK_SECONDS = 60.0
_LAST_BOOKMARK_SECONDS = 2.0
"""How long before its end a watch gets a last bookmark."""
_EXPIRED_CONTINUE = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new list without "
    "the continue parameter, or use the continue token in this response to retrieve the remainder of the results. "
    "Continuing with the provided token results in an inconsistent list - objects that were created, modified, or "
    "deleted between the time the first chunk was returned and now may show up in the list."
)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which objects of a resource a request is about."""

    namespace: str = ""
    """Empty: all namespaces."""
    test: Predicate | None = None
    """Selectors; None: everything."""
    resource: Resource

    def holds(self, name: Name, stored: Stored | None) -> bool:
        """Whether this version of the object belongs to the selection."""
        if stored is None or (self.namespace and name[0] != self.namespace):
            return False
        return self.test is None or self.test(object_as_seen(self.resource, stored.obj))


def select(resource: Resource, namespace: str, query: Mapping[str, str]) -> Selection:
    """Reads the selectors of a request. Raises ApiError 400."""
    fields = parse_field_selector(query.get("fieldSelector", ""), resource)
    labels = parse_label_selector(query.get("labelSelector", ""))
    return Selection(namespace=namespace, test=predicate(labels, fields), resource=resource)


def parse_version(text: str) -> int:
    """A resourceVersion of a query. Raises ApiError 500, as Kubernetes does, for what is no number."""
    if text.isdecimal():
        return int(text)
    quoted = json.dumps(text)
    message = f"resourceVersion: Invalid value: {quoted}: strconv.ParseUint: parsing {quoted}: invalid syntax"
    raise ApiError(500, "", message)


@dataclass(frozen=True)
class Page:
    """One answer of a list."""

    items: list[Stored]
    meta: Json
    """ListMeta: resourceVersion, continue, remainingItemCount."""


def list_objects(cluster: Cluster, selection: Selection, query: Mapping[str, str]) -> Page:
    """The objects of a selection, a page at a time when `limit` is given. Raises ApiError 400, 410, 504."""
    limit = _limit(query)
    collection = selection.resource.collection
    version, start = cluster.store.version, ""
    token = query.get("continue", "")
    wanted = query.get("resourceVersion", "")
    if query.get("resourceVersionMatch") and not wanted:
        text = "Forbidden: resourceVersionMatch is forbidden unless resourceVersion is provided"
        causes = [Cause(field="resourceVersionMatch", message=text, reason="FieldValueForbidden")]
        raise invalid_options("ListOptions", causes)
    if token:
        if wanted not in ("", "0"):
            raise bad_request("specifying resource version is not allowed when using continue")
        version, start = _read_token(token)
    elif wanted:
        _check_future(cluster, parse_version(wanted))
        if query.get("resourceVersionMatch") == "Exact":
            version = int(wanted)
    if version == cluster.store.version:
        found = [(name, cluster.store.get(collection, name)) for name in cluster.store.names(collection)]
    else:
        try:
            found = [(name, stored) for name, stored in sorted(cluster.store.at_version(collection, version).items())]
        except ApiError as error:
            raise (_expired_token(cluster, start) if token else error) from error
    items = [
        (name, stored)
        for name, stored in found
        if stored is not None and _key(name) > start and selection.holds(name, stored)
    ]
    meta: Json = {"resourceVersion": str(version)}
    if limit and len(items) > limit:
        meta["continue"] = _write_token(version, _key(items[limit - 1][0]))
        if selection.test is None:
            meta["remainingItemCount"] = len(items) - limit
        items = items[:limit]
    return Page([stored for _, stored in items], meta)


def _limit(query: Mapping[str, str]) -> int:
    text = query.get("limit", "0") or "0"
    try:
        return max(0, int(text))
    except ValueError as error:
        message = f'strconv.ParseInt: parsing "{text}": invalid syntax'
        raise bad_request(message) from error


def _key(name: Name) -> str:
    return f"{name[0]}/{name[1]}\0"


def _write_token(version: int, start: str) -> str:
    text = json.dumps({"v": "meta.k8s.io/v1", "rv": version, "start": start})
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _read_token(token: str) -> tuple[int, str]:
    raw = b""
    try:
        raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        found = json.loads(raw)
        return int(found["rv"]), str(found["start"])
    except (ValueError, KeyError, TypeError) as error:
        why = str(error)[:100]
        if raw[:1] != b"{":
            why = f"invalid character '{raw[:1].decode('latin-1')}' looking for beginning of value"
        raise bad_request(f"invalid continue token: continue key is not valid: {why}") from error


def _expired_token(cluster: Cluster, start: str) -> ApiError:
    error = expired(_EXPIRED_CONTINUE)
    status = error.status() | {"metadata": {"continue": _write_token(cluster.store.version, start)}}
    return _WithMetadata(error, status)


class _WithMetadata(ApiError):
    """A 410 whose metadata carries a token that continues from now."""

    def __init__(self, error: ApiError, status: Json) -> None:
        super().__init__(error.code, error.reason, error.message)
        self._status = status

    def status(self) -> Json:
        return self._status


def _check_future(cluster: Cluster, version: int) -> None:
    now = cluster.store.version
    if version > now:
        cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
        raise ApiError(
            504,
            "Timeout",
            f"Timeout: Too large resource version: {version}, current: {now}",
            details={"causes": [cause], "retryAfterSeconds": 1},
            headers={"Retry-After": "1"},
        )


@dataclass(frozen=True)
class WatchEvent:
    """One event of a watch; a bookmark has no object."""

    kind: str
    stored: Stored | None
    version: int
    initial_end: bool = False
    """The bookmark that ends the initial events of a watch list."""


def check_watch(query: Mapping[str, str]) -> None:
    """Raises ApiError for options of a watch that contradict each other."""
    if query.get("sendInitialEvents") and query.get("resourceVersionMatch") != "NotOlderThan":
        text = "Forbidden: sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
        causes = [Cause(field="resourceVersionMatch", message=text, reason="FieldValueForbidden")]
        raise invalid_options("ListOptions", causes)
    if query.get("resourceVersion"):
        parse_version(query["resourceVersion"])


async def watch(
    cluster: Cluster, selection: Selection, query: Mapping[str, str], *, timeout_seconds: float
) -> AsyncIterator[WatchEvent]:
    """Changes of a selection until the timeout. Raises ApiError 410 when the position has left the history."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_seconds
    collection = selection.resource.collection
    bookmarks = query.get("allowWatchBookmarks", "").lower() in ("true", "1")
    text = query.get("resourceVersion", "")
    initial = query.get("sendInitialEvents", "").lower()
    with cluster.store.waiter(collection) as waiter:
        position = int(text or 0)
        if initial == "true" or (position == 0 and initial != "false"):
            position = cluster.store.version
            for stored in cluster.store.all(collection):
                name = (stored.obj["metadata"].get("namespace", ""), stored.obj["metadata"]["name"])
                if selection.holds(name, stored):
                    yield WatchEvent("ADDED", stored, stored.version)
            if initial == "true" and bookmarks:
                yield WatchEvent("BOOKMARK", None, position, initial_end=True)
        elif position == 0:
            position = cluster.store.version
        next_bookmark = min(loop.time() + _BOOKMARK_SECONDS, _last_bookmark(loop.time(), end))
        while True:
            waiter.event.clear()
            for change in cluster.store.changes_since(collection, position):
                position = change.version
                event = _event(selection, change)
                if event is not None:
                    yield event
            now = loop.time()
            if now >= end:
                break
            if now >= next_bookmark:
                next_bookmark = min(now + _BOOKMARK_SECONDS, _last_bookmark(now, end))
                if bookmarks:
                    position = max(position, cluster.store.version)
                    yield WatchEvent("BOOKMARK", None, position)
            try:
                async with asyncio.timeout(min(end, next_bookmark) - now):
                    await waiter.event.wait()
            except TimeoutError:
                continue


def _last_bookmark(now: float, end: float) -> float:
    """When the bookmark before a watch's end is due, or never."""
    due = end - _LAST_BOOKMARK_SECONDS
    return due if due > now else float("inf")


def _event(selection: Selection, change: Change) -> WatchEvent | None:
    """What a change means to a selection: an object may enter or leave it without being created or deleted."""
    before, after = selection.holds(change.name, change.old), selection.holds(change.name, change.new)
    if after:
        return WatchEvent("MODIFIED" if before else "ADDED", change.last, change.version)
    if before:
        left = change.new is not None and change.old is not None  # it shows its last state inside the selection
        last = freeze(change.old.copy(), change.version) if left and change.old else change.last
        return WatchEvent("DELETED", last, change.version)
    return None
