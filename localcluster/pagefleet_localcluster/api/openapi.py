"""OpenAPI documents: as much as kubectl reads to validate, apply and explain."""

import hashlib
import json
from typing import Any

from pagefleet_localcluster.api.discovery import group_versions
from pagefleet_localcluster.api.resources import Registry, Resource

Json = dict[str, Any]
_BODIES = ("application/json-patch+json", "application/merge-patch+json", "application/apply-patch+yaml")
_TITLE, _VERSION = "Kubernetes", "v1.36.2"
_PATCH_PARAMETERS = ("dryRun", "fieldManager", "fieldValidation", "force")
_OPENAPI_KEYS = frozenset(
    {"type", "format", "description", "enum", "required", "properties", "items", "additionalProperties", "default"}
    | {"nullable", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"}
    | {"x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type", "x-kubernetes-int-or-string"}
    | {"x-kubernetes-preserve-unknown-fields", "x-kubernetes-validations"}
)


def index(registry: Registry) -> Json:
    """`GET /openapi/v3`: one document for each group version, with a hash of its content."""
    groups = {"": ["v1"]} | group_versions(registry)
    paths = {}
    for group, versions in groups.items():
        for version in versions:
            path = f"apis/{group}/{version}" if group else f"api/{version}"
            text = json.dumps(document(registry, group, version), sort_keys=True)
            digest = hashlib.sha256(text.encode()).hexdigest().upper()
            paths[path] = {"serverRelativeURL": f"/openapi/v3/{path}?hash={digest}"}
    return {"paths": paths}


def document(registry: Registry, group: str, version: str) -> Json:
    """`GET /openapi/v3/apis/GROUP/VERSION`."""
    paths: Json = {}
    schemas: Json = {}
    for resource in registry.all():
        if (resource.group, resource.version) == (group, version):
            paths[_path(resource)] = _operations(resource)
            name = _schema_name(resource)
            schemas[name] = _schema(resource.schema, schemas, root=True)
            schemas[name]["x-kubernetes-group-version-kind"] = [_kind(resource)]
    return {
        "openapi": "3.0.0",
        "info": {"title": _TITLE, "version": _VERSION},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _kind(resource: Resource) -> Json:
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


def _path(resource: Resource) -> str:
    root = f"/apis/{resource.group}/{resource.version}" if resource.group else f"/api/{resource.version}"
    return (
        f"{root}/namespaces/{{namespace}}/{resource.plural}/{{name}}"
        if resource.namespaced
        else (f"{root}/{resource.plural}/{{name}}")
    )


def _operations(resource: Resource) -> Json:
    parameters = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in _PATCH_PARAMETERS]
    patch = {
        "x-kubernetes-action": "patch",
        "x-kubernetes-group-version-kind": _kind(resource),
        "parameters": parameters,
        "requestBody": {"content": {media: {"schema": {"type": "object"}} for media in _BODIES}},
        "responses": {"200": {"description": "OK"}},
    }
    return {"patch": patch}


def _schema_name(resource: Resource) -> str:
    if resource.custom:
        reversed_group = ".".join(reversed(resource.group.split(".")))
        return f"{reversed_group}.{resource.version}.{resource.kind}"
    return f"io.k8s.api.{resource.kind}"


def _schema(schema: Json, schemas: Json, *, root: bool = False) -> Json:
    """A schema with named types moved to components and referred to."""
    name = schema.get("x-type-name")
    if name and not root:
        key = f"io.k8s.api.{name}"
        if key not in schemas:
            schemas[key] = {}
            schemas[key] = _schema(schema, schemas, root=True)
        found: Json = {"allOf": [{"$ref": f"#/components/schemas/{key}"}]}
        if "default" in schema:
            found["default"] = schema["default"]
        return found
    result: Json = {key: value for key, value in schema.items() if key in _OPENAPI_KEYS}
    if "properties" in schema:
        result["properties"] = {key: _schema(child, schemas) for key, child in schema["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            result[key] = _schema(schema[key], schemas)
    return result


SWAGGER_PROTOBUF = "application/com.github.proto-openapi.spec.v2@v1.0+protobuf"


def swagger() -> Json:
    """`GET /openapi/v2`: no types; kubectl falls back to it for kinds that v3 lacks."""
    return {"swagger": "2.0", "info": {"title": _TITLE, "version": _VERSION}, "paths": {}, "definitions": {}}


def swagger_protobuf() -> bytes:
    """The same as a `openapi.v2.Document` message (swagger = 1, info = 2, paths = 8, definitions = 9)."""
    info = _field(1, _TITLE.encode()) + _field(2, _VERSION.encode())
    return _field(1, b"2.0") + _field(2, info) + _field(8, b"") + _field(9, b"")


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited protobuf field; contents here are shorter than 128 bytes."""
    return bytes([number << 3 | 2, len(content)]) + content
