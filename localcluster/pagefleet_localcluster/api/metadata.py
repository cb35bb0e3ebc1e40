"""Rules of `metadata` that hold for every object."""

import re
from typing import Any

from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.errors import Cause, invalid
from pagefleet_localcluster.api.resources import Resource
from pagefleet_localcluster.api.validation import show

Json = dict[str, Any]

LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{LABEL}(\.{LABEL})*"
_SUBDOMAIN_TEXT = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start "
    f"and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '{_SUBDOMAIN}')"
)
_DNS_1035 = r"[a-z]([-a-z0-9]*[a-z0-9])?"
_DNS_1035_TEXT = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, "
    "and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is "
    f"'{_DNS_1035}')"
)
LABEL_TEXT = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with "
    f"an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '{LABEL}')"
)
_LABEL_VALUE = r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?"
_LABEL_VALUE_TEXT = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    f"end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    f"'{_LABEL_VALUE}')"
)
_OWNER_FIELDS = ("apiVersion", "kind", "name", "uid", "controller", "blockOwnerDeletion")
_KEY_NAME = r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_DUPLICATE_OWNERS = (
    ".metadata.ownerReferences contains duplicate entries; API server dedups owner references in 1.20+, and may reject "
    "such requests as early as 1.24; please fix your requests; duplicate UID(s) observed: "
)
_MAX_ANNOTATION_BYTES = 256 * 1024
_RBAC_GROUP = "rbac.authorization.k8s.io"


def name_new(cluster: Cluster, resource: Resource, obj: Json) -> None:
    """Gives a new object its name when only a prefix is given. Raises ApiError 422 without either."""
    meta = obj["metadata"]
    if not meta.get("name"):
        prefix = meta.get("generateName")
        if not prefix:
            text = "Required value: name or generateName is required"
            causes = [Cause(field="metadata.name", message=text, reason="FieldValueRequired")]
            raise invalid(resource.kind, resource.group, "", causes)
        meta["name"] = cluster.name_from(str(prefix))


def merge_owners(obj: Json) -> list[str]:
    """Takes out owner references that stand there twice; returns the warning."""
    owners = obj["metadata"].get("ownerReferences")
    if not isinstance(owners, list):
        return []
    once = [owner for index, owner in enumerate(owners) if owner not in owners[:index]]
    if len(once) == len(owners):
        return []
    twice = sorted({str(owner.get("uid")) for owner in owners if owners.count(owner) > 1})
    obj["metadata"]["ownerReferences"] = once
    return [_DUPLICATE_OWNERS + ", ".join(twice)]


def stamp_new(cluster: Cluster, obj: Json, *, has_generation: bool) -> None:
    """Sets what the API owns on a new object."""
    meta = obj["metadata"]
    for name in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink"):
        meta.pop(name, None)
    meta["uid"] = cluster.new_uid()
    meta["creationTimestamp"] = cluster.now()
    if has_generation:
        meta["generation"] = 1


def keep_fixed(obj: Json, old: Json) -> None:
    """Takes over from the stored object what no client may change."""
    meta, kept = obj["metadata"], old["metadata"]
    for name in ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation"):
        meta.pop(name, None)
        if name in kept:
            meta[name] = kept[name]
    meta.pop("selfLink", None)
    if "managedFields" not in meta and "managedFields" in kept:
        meta["managedFields"] = kept["managedFields"]
    for name in ("labels", "annotations", "finalizers", "ownerReferences"):
        if name in meta and not meta[name]:
            del meta[name]


def spec_differs(obj: Json, old: Json, *, has_status: bool) -> bool:
    """Whether anything besides metadata (and status, where it has its own endpoint) differs."""
    aside = {"metadata", "status"} if has_status else {"metadata"}
    return {k: v for k, v in obj.items() if k not in aside} != {k: v for k, v in old.items() if k not in aside}


def may_go(resource: Resource, obj: Json) -> bool:
    """Whether an object that is being deleted has nothing left that holds it."""
    meta = obj["metadata"]
    if meta.get("finalizers") or meta.get("deletionGracePeriodSeconds"):
        return False
    return not (resource.collection == ("", "namespaces") and obj.get("spec", {}).get("finalizers"))


def check(resource: Resource, obj: Json, old: Json | None) -> list[Cause]:
    """Faults of the metadata."""
    meta = obj["metadata"]
    causes = _check_name(resource, str(meta["name"])) if old is None else []
    causes += check_labels(meta.get("labels") or {})
    causes += check_annotations(meta.get("annotations") or {})
    causes += _check_owners(meta.get("ownerReferences") or [])
    if old is not None and old["metadata"].get("deletionTimestamp"):
        held = old["metadata"].get("finalizers") or []
        added = sorted(set(meta.get("finalizers") or []) - set(held))
        if added:
            shown = ", ".join(f'"{name}"' for name in added)
            text = (
                "Forbidden: no new finalizers can be added if the object is being deleted, "
                f"found new finalizers []string{{{shown}}}"
            )
            fault = Cause(field="metadata.finalizers", message=text, reason="FieldValueForbidden")
            causes += [fault, fault]  # a real server says it twice
    return causes


def _check_name(resource: Resource, name: str) -> list[Cause]:
    if resource.group == _RBAC_GROUP:
        pattern, text, most = r"[^/%]+", "may not contain '/' or '%'", 253
    elif resource.collection == ("", "services"):
        pattern, text, most = _DNS_1035, _DNS_1035_TEXT, 63
    elif resource.collection == ("", "namespaces"):
        pattern, text, most = LABEL, LABEL_TEXT, 63
    else:
        pattern, text, most = _SUBDOMAIN, _SUBDOMAIN_TEXT, 253
    causes = []
    if not re.fullmatch(pattern, name):
        causes.append(Cause(field="metadata.name", message=f"Invalid value: {show(name)}: {text}"))
    if len(name) > most:
        text = f"Invalid value: {show(name)}: must be no more than {most} characters"
        causes.append(Cause(field="metadata.name", message=text))
    return causes


def _check_key(key: str, field: str) -> list[Cause]:
    prefix, slash, name = key.rpartition("/")
    good = len(name) <= 63 and re.fullmatch(_KEY_NAME, name)
    if slash:
        good = good and len(prefix) <= 253 and re.fullmatch(_SUBDOMAIN, prefix)
    if good:
        return []
    text = (
        f"Invalid value: {show(key)}: name part must consist of alphanumeric characters, '-', '_' or '.', and must "
        "start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for "
        "validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
    )
    return [Cause(field=field, message=text)]


def check_labels(labels: Json, field: str = "metadata.labels") -> list[Cause]:
    """Keys and values of labels; `field` is where they stand."""
    causes = []
    for key, value in labels.items():
        causes += _check_key(key, field)
        if not isinstance(value, str):
            continue
        if len(value) > 63:
            text = f"Invalid value: {show(value)}: must be no more than 63 characters"
            causes.append(Cause(field=field, message=text))
        elif not re.fullmatch(_LABEL_VALUE, value):
            text = f"Invalid value: {show(value)}: {_LABEL_VALUE_TEXT}"
            causes.append(Cause(field=field, message=text))
    return causes


def check_annotations(annotations: Json, field: str = "metadata.annotations") -> list[Cause]:
    """Keys and size of annotations; `field` is where they stand."""
    causes = []
    for key in annotations:
        causes += _check_key(key.lower(), field)
    if sum(len(key) + len(str(value)) for key, value in annotations.items()) > _MAX_ANNOTATION_BYTES:
        text = f"Too long: may not be more than {_MAX_ANNOTATION_BYTES} bytes"
        causes.append(Cause(field=field, message=text, reason="FieldValueTooLong"))
    return causes


def _check_owners(owners: list[Json]) -> list[Cause]:
    causes = []
    for index, owner in enumerate(owners):
        for name in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(name):
                text = 'Invalid value: "": must not be empty'
                causes.append(Cause(field=f"metadata.ownerReferences[{index}].{name}", message=text))
    controllers = [owner for owner in owners if owner.get("controller")]
    if len(controllers) > 1:
        first, second = (f"{owner.get('kind')}/{owner.get('name')}" for owner in controllers[:2])
        shown = [{key: owner[key] for key in _OWNER_FIELDS if key in owner} for owner in owners]
        text = (
            f"Invalid value: {show(shown)}: Only one reference can have Controller set to true. "
            f'Found "true" in references for {first} and {second}'
        )
        causes.append(Cause(field="metadata.ownerReferences", message=text))
    return causes
