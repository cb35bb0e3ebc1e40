"""`spec.template`: the user's additions to the pod, merged over ours. Pure.

Objects merge field by field, lists by a table of merge keys; a list without one replaces ours. What the operator
relies on (labels, the server's command, ports and probes, the grace period) cannot be changed here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pagefleet_operator import names

Manifest = dict[str, Any]

MERGE_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "ports": ("containerPort", "protocol"),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "hostAliases": ("ip",),
}
"""Lists of these fields merge item by item."""

APPENDED = frozenset({"tolerations"})
"""Lists of these fields are added to ours."""

KEY_DEFAULTS: Mapping[str, Any] = {"protocol": "TCP"}

SERVER_FIELDS = (
    "command",
    "args",
    "image",
    "ports",
    "startupProbe",
    "livenessProbe",
    "readinessProbe",
    "lifecycle",
    "restartPolicy",
)
"""Of the container `server`: set from other fields of the spec."""
POD_FIELDS = ("restartPolicy", "terminationGracePeriodSeconds", "ephemeralContainers")
"""Of the pod: set from other fields of the spec, or impossible in a template."""

SERVER_NAME = (("spec", "containers", "name"), ("spec", "initContainers", "name"))

BASE_URL = f"http://$(POD_IP):{names.SERVER_PORT}/v1"
"""PAGEFLEET_BASE_URL of the user's own containers: the server beside them."""


def home_of(placement: str) -> str:
    """The list of the pod that holds the server: a native sidecar is an init container that keeps running."""
    return "initContainers" if placement == "Sidecar" else "containers"


def problems_of(template: Any, path: str, placement: str) -> Iterator[str]:
    """What is wrong with a template, as "field: what"."""
    if not isinstance(template, Mapping):
        yield f"{path}: must be an object"
        return
    for name in template:
        if name not in ("metadata", "spec"):
            yield f"{path}.{name}: is no field; a template has metadata and spec"
    yield from _patches(template, path)
    metadata, spec = ({} if template.get(part) is None else template[part] for part in ("metadata", "spec"))
    if not isinstance(metadata, Mapping) or not isinstance(spec, Mapping):
        yield f"{path}: metadata and spec must be objects"
        return
    for name in metadata:
        if name not in ("labels", "annotations"):
            yield f"{path}.metadata.{name}: only labels and annotations can be added"
    for kind, reserved in (("labels", names.labels("")), ("annotations", {names.TEMPLATE_HASH: ""})):
        added = {} if metadata.get(kind) is None else metadata[kind]
        if not isinstance(added, Mapping):
            yield f"{path}.metadata.{kind}: must be an object"
            continue
        for name in reserved:
            if name in added:
                yield f"{path}.metadata.{kind}.{name}: is set by the operator"
    for name in POD_FIELDS:
        if name in spec:
            yield f"{path}.spec.{name}: is set by the operator"
    yield from _container_problems(spec, path, home_of(placement))
    if placement == "Sidecar" and not spec.get("containers"):
        yield f"{path}.spec.containers: must hold the containers beside which the sidecar runs"


def _container_problems(spec: Mapping[str, Any], path: str, home: str) -> Iterator[str]:
    for kind in ("containers", "initContainers"):
        containers = [] if spec.get(kind) is None else spec[kind]
        if not isinstance(containers, list) or not all(isinstance(item, Mapping) for item in containers):
            yield f"{path}.spec.{kind}: must be a list of objects"
            continue
        for index, container in enumerate(containers):
            if not isinstance(container.get("name"), str):
                yield f"{path}.spec.{kind}[{index}].name: is required"
            env = container.get("env")
            if env is not None and not (isinstance(env, list) and all(isinstance(item, Mapping) for item in env)):
                yield f"{path}.spec.{kind}[{index}].env: must be a list of objects"
            if container.get("name") != names.CONTAINER:
                continue
            if kind != home:
                yield f"{path}.spec.{kind}[{index}].name: {names.CONTAINER} is the server's, under spec.{home}"
                continue
            for name in SERVER_FIELDS:
                if name in container:
                    yield (
                        f"{path}.spec.{kind}[{index}].{name}: of the container {names.CONTAINER} is set by the "
                        "operator; use spec.engine, spec.startup and spec.drain"
                    )


def refused_fields(template: Mapping[str, Any], allowed: Sequence[str]) -> list[str]:
    """Paths of a template that lie under none of `allowed` (like spec.nodeSelector, spec.containers.env), sorted.

    Items of lists do not count in a path. The name of the container `server` may always be given.
    """
    return sorted({path for path in _leaves(template, ()) if not any(_lies_under(path, root) for root in allowed)})


def _lies_under(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}.")


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            if (*path, name) in SERVER_NAME and item == names.CONTAINER:
                continue
            yield from _leaves(item, (*path, str(name)))
    elif isinstance(value, list) and value:
        for item in value:
            yield from _leaves(item, path)
    elif path:
        yield ".".join(path)


def _patches(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            if str(name).startswith("$"):
                yield f"{path}.{name}: directives of strategic merge are not supported"
            yield from _patches(item, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _patches(item, f"{path}[{index}]")


def merged(pod_template: Manifest, template: Mapping[str, Any]) -> Manifest:
    """Our pod template with the user's merged over it; the user's containers learn where the server is.

    Neither argument is changed; the result shares parts with `pod_template`.
    """
    made: Manifest = _merge(pod_template, _without_nulls(template))
    for container in [*made["spec"].get("containers", []), *made["spec"].get("initContainers", [])]:
        if container["name"] != names.CONTAINER:
            _introduce(container)
    return made


def _without_nulls(value: Any) -> Any:
    """A copy. A field that is null is a field that is not there, as everywhere in the API."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _introduce(container: Manifest) -> None:
    """POD_IP must stand before the variable that refers to it."""
    env = container.get("env") or []
    known = {item.get("name") for item in env}
    added = []
    if "POD_IP" not in known:
        added.append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    if "PAGEFLEET_BASE_URL" not in known:
        added.append({"name": "PAGEFLEET_BASE_URL", "value": BASE_URL})
    container["env"] = [*added, *env]


def _merge(ours: Any, theirs: Any, field: str = "") -> Any:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        made = dict(ours)
        for name, value in theirs.items():
            made[name] = _merge(made[name], value, name) if name in made else value
        return made
    if isinstance(ours, list) and isinstance(theirs, list):
        if field in APPENDED:
            return [*ours, *(item for item in theirs if item not in ours)]
        if field in MERGE_KEYS:
            return _merge_lists(ours, theirs, MERGE_KEYS[field])
    return theirs


def _merge_lists(ours: list[Any], theirs: list[Any], keys: tuple[str, ...]) -> list[Any]:
    made = list(ours)
    places = {_key(item, keys): index for index, item in enumerate(made)}
    for item in theirs:
        place = places.get(_key(item, keys))
        if place is None:
            places[_key(item, keys)] = len(made)
            made.append(item)
        else:
            made[place] = _merge(made[place], item)
    return made


def _key(item: Any, keys: tuple[str, ...]) -> tuple[Any, ...]:
    if not isinstance(item, Mapping):
        return (repr(item),)
    return tuple(repr(item.get(key, KEY_DEFAULTS.get(key))) for key in keys)
