"""What a request is about: the resource, the object and the body."""

import json
from dataclasses import dataclass
from typing import Any

import yaml

from pagefleet_localcluster.api.errors import ApiError, bad_request, unsupported_media_type
from pagefleet_localcluster.api.resources import Registry, Resource
from pagefleet_localcluster.api.store import Name

Json = dict[str, Any]
MAX_BODY_BYTES = 3 * 2**20
MAX_YAML_NODES = 200_000
_BODY_TYPES = ("application/json", "application/yaml", "application/vnd.kubernetes.protobuf")


@dataclass(frozen=True)
class Target:
    """The place that a path names."""

    resource: Resource
    namespace: str = ""
    """Empty: cluster scope, or all namespaces."""
    name: str = ""
    """Empty: the collection."""
    subresource: str = ""

    @property
    def key(self) -> Name:
        """The name in the store."""
        return (self.namespace, self.name)


def parse_target(registry: Registry, path: str) -> Target | None:
    """Reads `/api/v1/...` and `/apis/GROUP/VERSION/...`; None when nothing is served there."""
    parts = [part for part in path.split("/") if part]
    if not parts or len(parts) < 3:
        return None
    if parts[0] == "api":
        group, version, rest = "", parts[1], parts[2:]
    elif len(parts) >= 4:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    if rest[0] == "namespaces" and len(rest) >= 3 and (rest[2] not in ("status", "finalize") or len(rest) > 3):
        namespace, rest = rest[1], rest[2:]
        resource = registry.get(group, version, rest[0])
        if resource is None or not resource.namespaced:
            return None
    else:
        namespace = ""
        resource = registry.get(group, version, rest[0])
        if resource is None or (resource.namespaced and len(rest) > 1):
            return None
    if len(rest) > 3:
        return None
    name, subresource = (*rest[1:], "", "")[:2]
    return Target(resource, namespace, name, subresource)


def decode(body: bytes, content_type: str, kind: str, accepted: tuple[str, ...] = _BODY_TYPES) -> Any:
    """A body as Python values. Raises ApiError 400, 413 or 415."""
    media = content_type.partition(";")[0].strip().lower()
    if len(body) > MAX_BODY_BYTES:
        text = f"Request entity too large: limit is {MAX_BODY_BYTES}"
        raise ApiError(413, "RequestEntityTooLarge", text)
    if media == "application/vnd.kubernetes.protobuf":
        text = (
            "protobuf bodies are not supported by this server: send JSON (with kubectl: write a manifest, `apply -f`)"
        )
        raise ApiError(415, "UnsupportedMediaType", text)
    if media not in accepted and not (media == "" and "application/json" in accepted):
        raise unsupported_media_type(accepted)
    if media == "application/yaml" or media.endswith("+yaml"):
        return _decode_yaml(body)
    try:
        found = json.loads(body)
    except RecursionError as error:
        raise bad_request("json parse error: exceeded max depth") from error
    except ValueError as error:
        shown = body[:1000].decode(errors="replace")
        why = f"couldn't get version/kind; json parse error: {_go_text(error, body)} ({shown})"
        raise bad_request(f"the object provided is unrecognized (must be of type {kind}): {why}") from error
    return found


def decode_object(body: bytes, content_type: str, kind: str, accepted: tuple[str, ...] = _BODY_TYPES) -> Json:
    """A body that must be an object. Raises ApiError 400, 413 or 415."""
    found = decode(body, content_type, kind, accepted)
    if not isinstance(found, dict):
        text = (
            f"couldn't get version/kind; json parse error: json: cannot unmarshal {type(found).__name__} into an object"
        )
        raise bad_request(f"the object provided is unrecognized (must be of type {kind}): {text}")
    return found


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML as JSON knows it: times stay text."""


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for letter, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def _decode_yaml(body: bytes) -> Any:
    try:
        return _plain(yaml.load(body, Loader=_Loader), [MAX_YAML_NODES])
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise bad_request(f"error decoding YAML: {str(error)[:500]}") from error


def _plain(value: Any, left: list[int]) -> Any:
    """A copy in which nothing is shared: aliases may not multiply or turn in circles. Raises ValueError."""
    left[0] -= 1
    if left[0] < 0:
        raise ValueError(f"a document may have {MAX_YAML_NODES} nodes, aliases counted each time")
    if isinstance(value, dict):
        return {str(key): _plain(item, left) for key, item in value.items()}
    return [_plain(item, left) for item in value] if isinstance(value, list) else value


def _go_text(error: ValueError, body: bytes) -> str:
    """The parse error in Go's words where a client may look for them."""
    if isinstance(error, json.JSONDecodeError):
        rest = error.doc[error.pos :].strip()
        if not rest:
            return "unexpected end of JSON input"
        return f"invalid character {rest[0]!r} at offset {error.pos}"
    return f"invalid UTF-8 in {len(body)} bytes"
