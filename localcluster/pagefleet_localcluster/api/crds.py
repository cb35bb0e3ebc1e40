"""CustomResourceDefinitions: their defaults and status, and the resources that they bring."""

from typing import Any

from pagefleet_localcluster.api.builtin_types import builtin_types
from pagefleet_localcluster.api.cel_rules import rules_only
from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.crd_rules import check_schema
from pagefleet_localcluster.api.crd_shape import check_shape
from pagefleet_localcluster.api.errors import Cause
from pagefleet_localcluster.api.json_paths import parse_path
from pagefleet_localcluster.api.resources import CRD_VERBS, Resource, ScalePaths
from pagefleet_localcluster.api.schema import Schema
from pagefleet_localcluster.api.validation import show

Json = dict[str, Any]
COLLECTION = ("apiextensions.k8s.io", "customresourcedefinitions")


def prepare_crd(cluster: Cluster, obj: Json, old: Json | None) -> None:
    """Names that follow from others, and the status: names are accepted at once."""
    spec = obj["spec"]
    names = spec.setdefault("names", {})
    kind = names.get("kind", "")
    names.setdefault("singular", kind.lower())
    names.setdefault("listKind", f"{kind}List")
    spec.setdefault("conversion", {"strategy": "None"})
    now = cluster.now()
    status = obj.setdefault("status", {})
    status["acceptedNames"] = dict(names)
    if old is None or not status.get("conditions"):
        texts = [("NamesAccepted", "NoConflicts", "no conflicts found")]
        texts.append(("Established", "InitialNamesAccepted", "the initial names have been accepted"))
        status["conditions"] = [
            {"type": kind_, "status": "True", "lastTransitionTime": now, "reason": reason, "message": message}
            for kind_, reason, message in texts
        ]
    stored = status.setdefault("storedVersions", [])
    for version in spec.get("versions") or ():
        if version.get("storage") and version["name"] not in stored:
            stored.append(version["name"])


def check_crd(obj: Json, old: Json | None) -> list[Cause]:
    """The name follows from group and plural, and exactly one version is stored."""
    spec = obj["spec"]
    causes = []
    wanted = f"{spec['names']['plural']}.{spec['group']}"
    if obj["metadata"]["name"] != wanted:
        text = f'Invalid value: "{obj["metadata"]["name"]}": must be spec.names.plural+"."+spec.group'
        causes.append(Cause(field="metadata.name", message=text))
    if sum(bool(version.get("storage")) for version in spec["versions"]) != 1:
        shown = f"Invalid value: {len(spec['versions'])}"
        causes.append(
            Cause(field="spec.versions", message=f"{shown}: must have exactly one version marked as storage version")
        )
    for index, version in enumerate(spec["versions"]):
        for number, column in enumerate(version.get("additionalPrinterColumns") or ()):
            try:
                parse_path(column["jsonPath"])
            except ValueError as error:
                path = f"spec.versions[{index}].additionalPrinterColumns[{number}].jsonPath"
                causes.append(Cause(field=path, message=f"Invalid value: {show(column['jsonPath'])}: {error}"))
        if not (version.get("schema") or {}).get("openAPIV3Schema"):
            path = f"spec.versions[{index}].schema.openAPIV3Schema"
            text = "Required value: schemas are required"
            causes.append(Cause(field=path, message=text, reason="FieldValueRequired"))
    causes += _check_schemas(spec["versions"])
    if old is not None and old["spec"]["scope"] != spec["scope"]:
        text = f'Invalid value: "{spec["scope"]}": field is immutable'
        causes.append(Cause(field="spec.scope", message=text))
    return causes


def _check_schemas(versions: list[Json]) -> list[Cause]:
    """Faults of the schemas; one that all versions share is named by its old place, as a real server does."""
    schemas = [(version.get("schema") or {}).get("openAPIV3Schema") or {} for version in versions]
    places = [f"spec.versions[{index}].schema.openAPIV3Schema" for index in range(len(schemas))]
    wrong = [cause for schema, place in zip(schemas, places, strict=True) for cause in check_shape(schema, place)]
    if wrong:
        return wrong
    if all(schema == schemas[0] for schema in schemas):
        return check_schema(schemas[0], "spec.validation.openAPIV3Schema")
    return [cause for schema, place in zip(schemas, places, strict=True) for cause in check_schema(schema, place)]


def resources_of(crd: Json) -> list[Resource]:
    """One resource for each served version."""
    spec, names = crd["spec"], crd["spec"]["names"]
    storage = next(version["name"] for version in spec["versions"] if version.get("storage"))
    found = []
    for version in spec["versions"]:
        if not version.get("served"):
            continue
        subresources = version.get("subresources") or {}
        found.append(
            Resource(
                group=spec["group"],
                version=version["name"],
                plural=names["plural"],
                kind=names["kind"],
                singular=names["singular"],
                list_kind=names["listKind"],
                namespaced=spec["scope"] == "Namespaced",
                short_names=tuple(names.get("shortNames") or ()),
                categories=tuple(names.get("categories") or ()),
                verbs=CRD_VERBS,
                has_status="status" in subresources,
                scale=_scale(subresources.get("scale")),
                schema=_complete(version["schema"]["openAPIV3Schema"]),
                rules=rules_only(version["schema"]["openAPIV3Schema"]),
                fields=frozenset(f["jsonPath"].lstrip(".") for f in version.get("selectableFields") or ()),
                custom=True,
                columns=tuple(version.get("additionalPrinterColumns") or _DEFAULT_COLUMNS),
                storage_version=storage,
            )
        )
    return found


_DEFAULT_COLUMNS: tuple[Json, ...] = ({"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},)


def _complete(schema: Schema) -> Schema:
    """The schema with the fields that every object has."""
    properties = dict(schema.get("properties") or {})
    properties["apiVersion"] = properties["kind"] = {"type": "string"}
    properties["metadata"] = builtin_types().schema("ObjectMeta")
    return {**schema, "properties": properties}


def _scale(found: Json | None) -> ScalePaths | None:
    if found is None:
        return None
    selector = found.get("labelSelectorPath")
    return ScalePaths(
        spec=_path(found["specReplicasPath"]),
        status=_path(found["statusReplicasPath"]),
        selector=_path(selector) if selector else (),
    )


def _path(text: str) -> tuple[str, ...]:
    return tuple(text.lstrip(".").split("."))
