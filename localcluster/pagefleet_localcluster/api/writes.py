"""Create, replace, patch and apply: everything that happens to an object before it is stored."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagefleet_localcluster.api import admission, metadata, ownership
from pagefleet_localcluster.api.cel_rules import run_rules
from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.errors import (
    ApiError,
    Cause,
    already_exists,
    bad_request,
    conflict,
    forbidden,
    invalid,
    not_found,
    wrong_version,
)
from pagefleet_localcluster.api.resources import Resource
from pagefleet_localcluster.api.schema import Schema, apply_defaults, drop_empty, drop_nulls, prune, spell_quantities
from pagefleet_localcluster.api.store import Name, Stored, freeze
from pagefleet_localcluster.api.strategies import strategy_of
from pagefleet_localcluster.api.validation import QUANTITY_TEXT, show, validate

Json = dict[str, Any]
UNCHECKED = Cause(
    field="<nil>",
    message="Invalid value: null: some validation rules were not checked because the object was invalid; "
    "correct the existing errors to complete validation",
)
_STRUCTURAL = frozenset(
    {"FieldValueRequired", "FieldValueTypeInvalid", "FieldValueNotSupported", "FieldValueTooMany", "FieldValueTooLong"}
)
_EXPECTED = {"integer": "numeric (int or float)", "number": "numeric (int or float)", "array": "list", "object": "map"}
_EXPECTED |= {name: name for name in ("string", "boolean")}


@dataclass(kw_only=True)
class WriteOptions:
    """Options of one write, from query and headers."""

    manager: str = "unknown"
    """Field manager."""
    subresource: str = ""
    """`status`, `scale` or empty."""
    field_validation: str = "Warn"
    """What an unknown field does: Strict refuses, Warn warns, Ignore says nothing."""
    dry_run: bool = False
    """Answers as if, stores nothing."""
    force: bool = False
    """Server-side apply takes fields from other managers."""
    warnings: list[str] = field(default_factory=list)
    """Filled with the texts of Warning headers."""


def create(cluster: Cluster, resource: Resource, namespace: str, body: Json, options: WriteOptions) -> Stored:
    """Stores a new object. Raises ApiError."""
    obj = checked_body(resource, namespace, body)
    _decode(resource, obj, options)
    metadata.name_new(cluster, resource, obj)
    return _create(cluster, resource, namespace, obj, options, None)


Track = Callable[[Json], Json]


def _create(
    cluster: Cluster, resource: Resource, namespace: str, obj: Json, options: WriteOptions, applied: Track | None
) -> Stored:
    meta = obj["metadata"]
    _check_namespace(cluster, resource, namespace, meta["name"])
    name = (namespace, meta["name"])
    if applied is not None:
        obj = applied(obj)
        meta = obj["metadata"]
    if resource.has_status:
        obj.pop("status", None)
    metadata.stamp_new(cluster, obj, has_generation=strategy_of(resource).has_generation)
    _normalise(cluster, resource, obj, None, options)
    _validate(resource, obj, None, "")
    if (there := cluster.get(resource, name)) is not None:
        error = already_exists(resource.plural, resource.group, meta["name"])
        if there.obj["metadata"].get("deletionTimestamp"):
            error.message = f"object is being deleted: {error.message}"
        raise error
    admission.admit_create(cluster, resource, obj)
    if applied is None:
        ownership.track_update(None, obj, resource.schema, writer(cluster, resource, options, "Update"))
    strategy_of(resource).complete(cluster, obj)
    if options.dry_run:
        return freeze(obj, cluster.store.version)
    return cluster.store.put(resource.collection, name, obj)


def update(
    cluster: Cluster, resource: Resource, name: Name, body: Json, options: WriteOptions, *, patched: bool = False
) -> Stored:
    """Replaces an object, or its status. Raises ApiError."""
    obj = checked_body(resource, name[0], body)
    _decode(resource, obj, options)
    stored = cluster.get(resource, name)
    if stored is None:
        raise not_found(resource.plural, resource.group, name[1])
    if obj["metadata"].get("name", name[1]) != name[1]:
        found = obj["metadata"].get("name")
        raise bad_request(f"the name of the object ({found}) does not match the name on the URL ({name[1]})")
    obj["metadata"]["name"] = name[1]
    if not obj["metadata"].get("resourceVersion") and resource.custom and not patched:
        text = "Invalid value: 0: must be specified for an update"
        causes = [Cause(field="metadata.resourceVersion", message=text)]
        raise invalid(resource.plural, resource.group, name[1], causes)
    return _update(cluster, resource, name, obj, stored, options)


def _update(
    cluster: Cluster,
    resource: Resource,
    name: Name,
    obj: Json,
    stored: Stored,
    options: WriteOptions,
    applied: bool = False,
) -> Stored:
    old = stored.obj
    _check_version(resource, name, obj, stored)
    kept = stored.copy()  # what is taken over must not be shared: it is normalised in place
    metadata.keep_fixed(obj, kept)
    _isolate(resource, obj, kept, options.subresource)
    _normalise(cluster, resource, obj, old, options)
    _validate(resource, obj, old, options.subresource)
    strategy = strategy_of(resource)
    if strategy.has_generation and metadata.spec_differs(obj, old, has_status=resource.has_status):
        obj["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
    if not applied:
        ownership.track_update(old, obj, resource.schema, writer(cluster, resource, options, "Update"))
    if ownership.same_but_managers(obj, old):
        return stored
    if options.dry_run:
        return freeze(obj, stored.version)
    if obj["metadata"].get("deletionTimestamp") and metadata.may_go(resource, obj):
        obj["metadata"]["resourceVersion"] = str(stored.version)
        cluster.store.remove(resource.collection, name, obj)
        return freeze(obj, stored.version)
    return cluster.store.put(resource.collection, name, obj)


def patch(
    cluster: Cluster, resource: Resource, name: Name, change: Callable[[Json], Any], options: WriteOptions
) -> Stored:
    """Changes an object by a function of its current state (a patch). Raises ApiError."""
    stored = cluster.get(resource, name)
    if stored is None:
        raise not_found(resource.plural, resource.group, name[1])
    body = change(stored.copy())
    if not isinstance(body, dict) or not isinstance(body.get("metadata"), dict):
        raise bad_request("the patched object is no longer an object with metadata")
    return update(cluster, resource, name, body, options, patched=True)


def apply(cluster: Cluster, resource: Resource, name: Name, config: Json, options: WriteOptions) -> tuple[Stored, bool]:
    """Server-side apply; whether it created the object comes second. Raises ApiError."""
    if (config.get("apiVersion"), config.get("kind")) != (resource.api_version, resource.kind):
        version, kind = str(config.get("apiVersion") or ""), config.get("kind") or ""
        raise bad_request(f"invalid object type: {version if '/' in version else '/' + version}, Kind={kind}")
    obj = checked_body(resource, name[0], config)
    if obj["metadata"].get("managedFields") is not None:
        raise bad_request("metadata.managedFields must be nil")
    if obj["metadata"].get("name", name[1]) != name[1]:
        raise bad_request(
            f"the name of the object ({obj['metadata']['name']}) does not match the name on the URL ({name[1]})"
        )
    stored = cluster.get(resource, name)
    if stored is None and options.subresource:
        raise not_found(resource.plural, resource.group, name[1])
    _check_typed(resource, config.get("metadata") or {}, obj)
    if stored is None and not obj["metadata"].get("name"):
        why = f"the name of the object ({name[1]} based on URL) was undeterminable: name must be provided"
        raise bad_request(why)
    obj["metadata"]["name"] = name[1]
    who = writer(cluster, resource, options, "Apply")
    if stored is None:
        created = _create(
            cluster, resource, name[0], obj, options,
            lambda new: ownership.apply(None, new, resource.schema, who, force=True),
        )  # fmt: skip
        return created, True
    version = obj["metadata"].pop("resourceVersion", None)
    merged = ownership.apply(stored.copy(), obj, resource.schema, who, force=options.force)
    if version is not None:
        merged["metadata"]["resourceVersion"] = version
    return _update(cluster, resource, name, merged, stored, options, applied=True), False


def _check_typed(resource: Resource, given: Json, obj: Json) -> None:
    """500, as a real server answers, for an applied object that does not fit its schema."""
    drop_nulls(obj if not resource.custom else obj["metadata"], resource.schema if not resource.custom else None)
    faults = []
    for cause in validate(obj, resource.schema):
        if cause.reason == "FieldValueTypeInvalid" and QUANTITY_TEXT not in cause.message:
            *_, wanted, got = (word.strip(':"') for word in cause.message.split())
            if got != "null" and (wanted, got) != ("integer", "number"):
                faults.append(f".{cause.field}: expected {_EXPECTED.get(wanted, wanted)}, got {got}")
    faults += [f".{path}: field not declared in schema" for path in prune(obj, resource.schema)]
    if not faults:
        return
    version = resource.api_version if resource.group else f"/{resource.version}"
    what = f"({given.get('namespace', '')}/{given.get('name', '')}; {version}, Kind={resource.kind})"
    text = faults[0] if len(faults) == 1 else "errors:" + "".join(f"\n  {fault}" for fault in faults)
    raise ApiError(500, "", f"failed to create typed patch object {what}: {text}")


def checked_body(resource: Resource, namespace: str, body: Json) -> Json:
    """The body with its type, namespace and metadata right. Raises ApiError 400 when they contradict the path."""
    version, kind = body.get("apiVersion") or "", body.get("kind") or ""
    meta = body.get("metadata") or {}
    if not isinstance(meta, dict):
        raise bad_request(f"metadata must be an object, it is {show(meta)[:100]}")
    if version != resource.api_version and (version or resource.custom):
        raise wrong_version(version, resource.api_version)
    if kind and kind != resource.kind:
        if resource.custom:
            fault = Cause(field="kind", message=f"Invalid value: {show(kind)}: must be {resource.kind}")
            raise invalid(str(kind), resource.group, str(meta.get("name", "")), [fault])
        text = f'{kind} in version "{resource.version}" cannot be handled as a {resource.kind}'
        raise bad_request(text)
    for name in ("name", "generateName", "namespace"):
        if not isinstance(meta.get(name) or "", str):
            raise bad_request(f"json: cannot unmarshal metadata.{name} {show(meta[name])[:100]} into a string")
    given = meta.get("namespace") or namespace
    if given != namespace and resource.namespaced:
        raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
    obj: Json = {"kind": resource.kind} | body | {"apiVersion": resource.stored_api_version}
    obj["metadata"] = dict(meta)
    if resource.namespaced:
        obj["metadata"]["namespace"] = namespace
    else:
        obj["metadata"].pop("namespace", None)
    return obj


def _check_namespace(cluster: Cluster, resource: Resource, namespace: str, name: str) -> None:
    if not resource.namespaced:
        return
    found = cluster.store.get(("", "namespaces"), ("", namespace))
    if found is None:
        raise not_found("namespaces", "", namespace)
    if found.obj["metadata"].get("deletionTimestamp"):
        why = f"unable to create new content in namespace {namespace} because it is being terminated"
        error = forbidden(resource.plural, resource.group, name, why)
        cause = {"reason": "NamespaceTerminating", "field": "metadata.namespace"}
        cause["message"] = f"namespace {namespace} is being terminated"
        error.details = {**(error.details or {}), "causes": [cause]}
        raise error


def _check_version(resource: Resource, name: Name, obj: Json, stored: Stored) -> None:
    meta, old = obj["metadata"], stored.obj["metadata"]
    if meta.get("uid") and meta["uid"] != old["uid"]:
        key = "/".join(filter(None, ("/registry", resource.group if resource.custom else "", resource.plural, *name)))
        why = (
            f"StorageError: invalid object, Code: 4, Key: {key}, ResourceVersion: 0, AdditionalErrorMsg: Precondition "
            f"failed: UID in precondition: {meta['uid']}, UID in object meta: {old['uid']}"
        )
        raise conflict(resource.plural, resource.group, name[1], why)
    if meta.get("resourceVersion") and meta["resourceVersion"] != str(stored.version):
        raise conflict(resource.plural, resource.group, name[1])


def _isolate(resource: Resource, obj: Json, old: Json, subresource: str) -> None:
    """The main endpoint leaves the status alone, the status endpoint everything else."""
    if subresource == "status":
        keep = {"status", "metadata", "apiVersion", "kind"}
        for key in [key for key in obj if key not in keep]:
            del obj[key]
        obj.update({key: value for key, value in old.items() if key not in keep})
        if resource.collection == ("apps", "deployments"):
            obj["metadata"]["labels"] = old["metadata"].get("labels", {})
        if resource.custom:
            managed = obj["metadata"].get("managedFields")
            version = obj["metadata"].get("resourceVersion")
            obj["metadata"] = dict(old["metadata"]) | ({"resourceVersion": version} if version else {})
            if managed is not None:
                obj["metadata"]["managedFields"] = managed
    elif resource.has_status:
        obj.pop("status", None)
        if "status" in old:
            obj["status"] = old["status"]


def _decode(resource: Resource, obj: Json, options: WriteOptions) -> None:
    """Pruned; unknown fields refuse or warn, fields of built-in types that have the wrong type refuse."""
    if resource.custom:
        drop_nulls(obj["metadata"], None)
    else:
        drop_nulls(obj, resource.schema)
    unknown = prune(obj, resource.schema)
    if unknown and options.field_validation == "Strict":
        texts = ", ".join(f'unknown field "{path}"' for path in unknown)
        raise bad_request(
            f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: '
            f"strict decoding error: {texts}"
        )
    if options.field_validation != "Ignore":
        options.warnings += [f'unknown field "{path}"' for path in unknown]
    faults = [] if resource.custom else validate(obj, resource.schema)
    if any(cause.reason == "FieldValueTypeInvalid" for cause in faults):
        raise _undecodable(resource, faults)


def _normalise(cluster: Cluster, resource: Resource, obj: Json, old: Json | None, options: WriteOptions) -> None:
    """Defaulted and completed."""
    options.warnings += metadata.merge_owners(obj)
    if not resource.custom:
        drop_empty(obj, resource.schema)
        for name in ("spec", "status"):
            if name in resource.schema["properties"]:
                obj.setdefault(name, {})
        spell_quantities(obj, resource.schema)
    faults = [] if resource.custom else validate(obj, resource.schema)
    apply_defaults(obj, resource.schema)
    if any(cause.reason == "FieldValueRequired" for cause in faults):
        faults = validate(obj, resource.schema)
        if faults:
            raise invalid(resource.kind, resource.group, obj["metadata"]["name"], faults)
    strategy_of(resource).prepare(cluster, obj, old)


def _undecodable(resource: Resource, faults: list[Cause]) -> ApiError:
    """400: a built-in object whose fields have the wrong types cannot even be read."""
    fault = next(cause for cause in faults if cause.reason == "FieldValueTypeInvalid")
    why = fault.message.replace("Invalid value: ", "json: cannot unmarshal ", 1)
    if QUANTITY_TEXT in why:
        why = QUANTITY_TEXT
    return bad_request(f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: {why}')


def _written(resource: Resource, obj: Json, subresource: str) -> tuple[Json, Schema]:
    """The part of an object that a write may change, and its schema: the rest is as it was stored."""
    if subresource != "status" or "status" not in obj:
        return obj, resource.schema
    status = (resource.schema.get("properties") or {}).get("status") or {}
    return {"status": obj["status"]}, {"type": "object", "properties": {"status": status}}


def _validate(resource: Resource, obj: Json, old: Json | None, subresource: str) -> None:
    causes = metadata.check(resource, obj, old)
    structural = validate(*_written(resource, obj, subresource))
    if resource.custom:
        causes += structural + _check_custom(resource, obj, old, structural)
    else:
        causes += strategy_of(resource).check(obj, old) + structural
    if causes:
        raise invalid(resource.kind, resource.group, obj["metadata"]["name"], causes)


def _check_custom(resource: Resource, obj: Json, old: Json | None, structural: list[Cause]) -> list[Cause]:
    causes = _check_scale(resource, obj)
    if any(cause.reason in _STRUCTURAL for cause in structural):
        return [*causes, UNCHECKED]
    return causes + (run_rules(obj, old, resource.rules) if resource.rules is not None else [])


def _check_scale(resource: Resource, obj: Json) -> list[Cause]:
    """The scale subresource's own check of the count."""
    if resource.scale is None:
        return []
    value: Any = obj
    for part in resource.scale.spec:
        value = value.get(part) if isinstance(value, dict) else None
    path = "." + ".".join(resource.scale.spec)
    if value is None:
        return []
    if isinstance(value, bool) or not isinstance(value, int):
        kind = {str: "string", float: "float64"}.get(type(value), type(value).__name__)
        text = f"Invalid value: 0: {path} accessor error: {value} is of the type {kind}, expected int64"
        return [Cause(field=path, message=text)]
    if value < 0:
        return [Cause(field=path, message=f"Invalid value: {value}: should be a non-negative integer")]
    return []


def writer(cluster: Cluster, resource: Resource, options: WriteOptions, operation: str) -> ownership.Writer:
    """Who this write is, for managedFields."""
    reset: frozenset[str] = frozenset()
    if options.subresource == "status":
        reset = frozenset({"spec", "metadata"} if resource.custom else {"spec"})
    elif resource.has_status:
        reset = frozenset({"status"})
    strategy = strategy_of(resource)
    return ownership.Writer(
        manager=options.manager,
        operation=operation,
        subresource=options.subresource,
        api_version=resource.api_version,
        now=cluster.now(),
        reset=reset,
        structs=frozenset(tuple("f:" + part for part in path.split(".")) for path in strategy.structs),
    )
