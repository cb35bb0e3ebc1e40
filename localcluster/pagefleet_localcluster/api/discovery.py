"""Discovery: what the server says about its versions, groups and resources."""

import base64
import hashlib
from typing import Any

from pagefleet_localcluster.api.resources import Registry, Resource

Json = dict[str, Any]
MINOR = 36
VERSION: Json = {
    "major": "1",
    "minor": str(MINOR),
    "emulationMajor": "1",
    "emulationMinor": str(MINOR),
    "minCompatibilityMajor": "1",
    "minCompatibilityMinor": str(MINOR - 1),
    "gitVersion": f"v1.{MINOR}.2",
    "gitCommit": "pagefleet-local",
    "gitTreeState": "clean",
    "buildDate": "2026-01-01T00:00:00Z",
    "goVersion": "python",
    "compiler": "python",
    "platform": "linux/amd64",
}
AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
_STATUS_VERBS = ["get", "patch", "update"]
# Resources that are only posted to: (group, version) -> (plural, kind).
REVIEWS = {
    ("authorization.k8s.io", "v1"): ("selfsubjectaccessreviews", "SelfSubjectAccessReview"),
    ("authentication.k8s.io", "v1"): ("selfsubjectreviews", "SelfSubjectReview"),
}


def wants_aggregated(accept: str) -> bool:
    """Whether the client asks for aggregated discovery."""
    parts = (part.replace(" ", "").split(";") for part in accept.split(","))
    return any("as=APIGroupDiscoveryList" in part and "v=v2" in part for part in parts)


def _subresources(resource: Resource) -> list[tuple[str, str, str, str, list[str]]]:
    """(name, group, version, kind, verbs)."""
    found = []
    if resource.has_status:
        found.append(("status", "", "", resource.kind, _STATUS_VERBS))
    if resource.scale:
        found.append(("scale", "autoscaling", "v1", "Scale", _STATUS_VERBS))
    if resource.collection == ("", "pods"):
        found += [
            ("binding", "", "v1", "Binding", ["create"]),
            ("eviction", "policy", "v1", "Eviction", ["create"]),
            ("exec", "", "v1", "PodExecOptions", ["create", "get"]),
            ("log", "", "v1", "Pod", ["get"]),
        ]
    return found


def api_versions(address: str) -> Json:
    """`GET /api`."""
    where = [{"clientCIDR": "0.0.0.0/0", "serverAddress": address}]
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": where}


def group_versions(registry: Registry) -> dict[str, list[str]]:
    """Versions by named group."""
    groups = {name: versions for name, versions in registry.groups().items() if name}
    for group, version in REVIEWS:
        groups.setdefault(group, [version])
    return groups


def api_group(name: str, versions: list[str]) -> Json:
    """`GET /apis/GROUP`."""
    found = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"kind": "APIGroup", "apiVersion": "v1", "name": name, "versions": found, "preferredVersion": found[0]}


def api_groups(registry: Registry) -> Json:
    """`GET /apis`."""
    groups = [api_group(name, versions) for name, versions in group_versions(registry).items()]
    for group in groups:
        del group["kind"], group["apiVersion"]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def api_resources(registry: Registry, group: str, version: str) -> Json | None:
    """`GET /apis/GROUP/VERSION` and `GET /api/v1`; None when nothing is served there."""
    found: list[Json] = []
    for entry in _aggregated_resources(registry, group, version):
        scope = {"namespaced": entry["scope"] == "Namespaced"}
        head = {"name": entry["resource"], "singularName": entry["singularResource"], **scope}
        head |= {"kind": entry["responseKind"]["kind"], "verbs": entry["verbs"]}
        head |= {key: entry[key] for key in ("shortNames", "categories") if key in entry}
        found.append(head)
        if (resource := registry.get(group, version, entry["resource"])) is not None:
            head["storageVersionHash"] = _hash(resource)
            for name, sub_group, sub_version, kind, verbs in _subresources(resource):
                shown = {"group": sub_group, "version": sub_version} if sub_group else {}
                sub = {"name": f"{resource.plural}/{name}", "singularName": "", **scope, **shown}
                found.append(sub | {"kind": kind, "verbs": verbs})
    if not found:
        return None
    head = {"kind": "APIResourceList"} | ({"apiVersion": "v1"} if group else {})
    return head | {"groupVersion": f"{group}/{version}" if group else version, "resources": found}


def _hash(resource: Resource) -> str:
    text = f"{resource.group}/{resource.storage_version or resource.version}/{resource.kind}"
    return base64.b64encode(hashlib.sha256(text.encode()).digest()[:8]).decode()


def aggregated(registry: Registry, *, core: bool) -> Json:
    """Aggregated discovery of `/api` (core) or `/apis`."""
    groups = {"": ["v1"]} if core else group_versions(registry)
    items = []
    for group, versions in groups.items():
        found = [
            {"version": version, "resources": _aggregated_resources(registry, group, version), "freshness": "Current"}
            for version in versions
        ]
        items.append({"metadata": {"name": group} if group else {"creationTimestamp": None}, "versions": found})
    return {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items}


def _aggregated_resources(registry: Registry, group: str, version: str) -> list[Json]:
    found: list[Json] = []
    for resource in registry.all():
        if (resource.group, resource.version) != (group, version):
            continue
        own = _kind(
            resource.group if resource.custom else "", resource.version if resource.custom else "", resource.kind
        )
        entry: Json = {
            "resource": resource.plural,
            "responseKind": own,
            "scope": "Namespaced" if resource.namespaced else "Cluster",
            "singularResource": resource.singular,
            "verbs": list(resource.verbs),
        }
        if resource.short_names:
            entry["shortNames"] = list(resource.short_names)
        if resource.categories:
            entry["categories"] = list(resource.categories)
        subresources = [
            {"subresource": name, "responseKind": _kind(g, v, kind) if g else own, "verbs": verbs}
            for name, g, v, kind, verbs in _subresources(resource)
        ]
        if subresources:
            entry["subresources"] = subresources
        found.append(entry)
    if review := REVIEWS.get((group, version)):
        found.append(
            {
                "resource": review[0],
                "responseKind": _kind("", "", review[1]),
                "scope": "Cluster",
                "singularResource": review[1].lower(),
                "verbs": ["create"],
            }
        )
    return found


def _kind(group: str, version: str, kind: str) -> Json:
    return {"group": group, "version": version, "kind": kind}
