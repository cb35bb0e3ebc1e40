"""What clients see of stored objects: in their version, as lists, as Tables, as metadata only."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.errors import not_acceptable
from pagefleet_localcluster.api.resources import Resource
from pagefleet_localcluster.api.store import Stored
from pagefleet_localcluster.api.tables import columns_of, row_of

Json = dict[str, Any]
_ACCEPTED = ("application/json", "application/yaml", "application/vnd.kubernetes.protobuf")


@dataclass(frozen=True)
class View:
    """The form that a client asked for."""

    form: str = ""
    """Empty: whole objects. `Table`, `PartialObjectMetadata` or `PartialObjectMetadataList`."""
    include: str = "Metadata"
    """What a Table's rows carry: None, Metadata or Object."""


def view_of(accept: str, include: str) -> View:
    """Reads an Accept header. Raises ApiError 406 when we speak none of its formats."""
    for part in accept.split(","):
        media, *parameters = (piece.strip() for piece in part.split(";"))
        if media not in ("application/json", "application/*", "*/*", ""):
            continue
        found = dict(piece.partition("=")[::2] for piece in parameters)
        form = found.get("as", "")
        if form and (found.get("g") != "meta.k8s.io" or found.get("v", "v1") not in ("v1", "v1beta1")):
            continue
        if form in ("", "Table", "PartialObjectMetadata", "PartialObjectMetadataList"):
            return View(form, include or "Metadata")
    raise not_acceptable(_ACCEPTED)


def as_seen(resource: Resource, stored: Stored) -> bytes:
    """One object as JSON in the version that the resource serves."""
    if stored.obj.get("apiVersion") == resource.api_version:
        return stored.text
    return json.dumps(object_as_seen(resource, stored.obj), separators=(",", ":")).encode()


def object_as_seen(resource: Resource, obj: Json) -> Json:
    """One object in the version that the resource serves."""
    return obj if obj.get("apiVersion") == resource.api_version else obj | {"apiVersion": resource.api_version}


def render(cluster: Cluster, resource: Resource, stored: Stored, view: View) -> bytes:
    """One object in the wanted form."""
    if view.form == "Table":
        return _dump(_table(cluster, resource, [stored], view, {"resourceVersion": str(stored.version)}))
    if view.form:
        return _dump(_partial(stored.obj))
    return as_seen(resource, stored)


def render_list(
    cluster: Cluster, resource: Resource, items: Sequence[Stored], meta: Json, view: View, *, header: bool = True
) -> bytes:
    """A list in the wanted form. `header`: whether a Table names its columns."""
    if view.form == "Table":
        return _dump(_table(cluster, resource, items, view, meta, header=header))
    if view.form:
        parts = [_dump(_partial(stored.obj)) for stored in items]
        head = {"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": meta}
    else:
        parts = [_without_type(resource, as_seen(resource, stored)) for stored in items]
        if resource.custom:
            meta = {"continue": meta.get("continue", "")} | meta
        head = {"kind": resource.list_kind, "apiVersion": resource.api_version, "metadata": meta}
    return _dump(head)[:-1] + b',"items":[' + b",".join(parts) + b"]}"


def _without_type(resource: Resource, text: bytes) -> bytes:
    """An item of a list: those of built-in resources carry neither kind nor apiVersion."""
    start = f'{{"kind":"{resource.kind}","apiVersion":"{resource.api_version}",'.encode()
    return text if resource.custom or not text.startswith(start) else b"{" + text[len(start) :]


def render_event(cluster: Cluster, resource: Resource, kind: str, stored: Stored, view: View, *, header: bool) -> bytes:
    """One line of a watch."""
    if view.form == "Table":
        meta = {"resourceVersion": str(stored.version)}
        body = _dump(_table(cluster, resource, [stored], view, meta, header=header))
    else:
        body = render(cluster, resource, stored, view)
    return b'{"type":"' + kind.encode() + b'","object":' + body + b"}\n"


def render_bookmark(resource: Resource, version: int, view: View, *, initial_end: bool) -> bytes:
    """The bookmark line: a version from which a watch may go on."""
    meta: Json = {"resourceVersion": str(version)}
    if initial_end:
        meta["annotations"] = {"k8s.io/initial-events-end": "true"}
    kind, api_version = resource.kind, resource.api_version
    if view.form:
        kind, api_version = view.form, "meta.k8s.io/v1"
    body = {"kind": kind, "apiVersion": api_version, "metadata": meta}
    if view.form == "Table":
        body |= {"columnDefinitions": [], "rows": []}
    return _dump({"type": "BOOKMARK", "object": body}) + b"\n"


def _dump(obj: Json) -> bytes:
    return json.dumps(obj, separators=(",", ":")).encode()


def _partial(obj: Json) -> Json:
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}


def _table(
    cluster: Cluster, resource: Resource, items: Sequence[Stored], view: View, meta: Json, *, header: bool = True
) -> Json:
    now = cluster.clock()
    rows = []
    for stored in items:
        row: Json = {"cells": row_of(resource, stored.obj, now)}
        if view.include == "Object":
            row["object"] = object_as_seen(resource, stored.obj)
        else:
            row["object"] = None if view.include == "None" else _partial(stored.obj)
        rows.append(row)
    table: Json = {"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": meta}
    return table | {"columnDefinitions": columns_of(resource) if header else [], "rows": rows}
