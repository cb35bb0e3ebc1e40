"""Deleting: grace periods, preconditions, propagation, finalizers."""

from dataclasses import dataclass
from typing import Any

from pagefleet_localcluster.api import metadata
from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.errors import Cause, bad_request, conflict, forbidden, invalid_options, not_found
from pagefleet_localcluster.api.resources import Resource
from pagefleet_localcluster.api.store import Name, Stored, freeze
from pagefleet_localcluster.api.strategies import strategy_of
from pagefleet_localcluster.objects import format_time, parse_time

Json = dict[str, Any]
_IMMORTAL_NAMESPACES = ("default", "kube-system", "kube-public")
FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
_POLICIES = {"Background": None, "Foreground": FOREGROUND, "Orphan": ORPHAN}


@dataclass(frozen=True, kw_only=True)
class DeleteOptions:
    """What a client may say about a deletion."""

    grace_seconds: int | None = None
    """None: the object's own."""
    propagation: str = "Background"
    """What happens to dependents: Background, Foreground (first) or Orphan."""
    uid: str | None = None
    """Precondition."""
    resource_version: str | None = None
    """Precondition."""
    dry_run: bool = False
    """Answers as if, deletes nothing."""


def parse_delete_options(body: Json, query: dict[str, str]) -> DeleteOptions:
    """Options of body and query together. Raises ApiError 400."""
    preconditions = body.get("preconditions") or {}
    grace: Any = body.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
    policy = body.get("propagationPolicy") or query.get("propagationPolicy")
    orphan = body.get("orphanDependents", query.get("orphanDependents"))
    if policy is None:
        policy = "Orphan" if str(orphan).lower() == "true" else "Background"
    if policy not in _POLICIES:
        text = f'Unsupported value: "{policy}": supported values: "Foreground", "Background", "Orphan", "nil"'
        causes = [Cause(field="propagationPolicy", message=text, reason="FieldValueNotSupported")]
        raise invalid_options("DeleteOptions", causes)
    try:
        seconds = None if grace is None else max(0, int(grace))
    except (TypeError, ValueError) as error:
        text = "json: cannot unmarshal string into Go struct field DeleteOptions.gracePeriodSeconds of type int64"
        raise bad_request(text) from error
    return DeleteOptions(
        grace_seconds=seconds,
        propagation=policy,
        uid=preconditions.get("uid"),
        resource_version=preconditions.get("resourceVersion"),
        dry_run=bool(body.get("dryRun") or query.get("dryRun")),
    )


def delete(cluster: Cluster, resource: Resource, name: Name, options: DeleteOptions) -> tuple[Stored, bool]:
    """Deletes, or marks for deletion what finalizers or a grace period still hold.

    Returns the last state and whether the object is gone. Raises ApiError."""
    stored = cluster.get(resource, name)
    if stored is None:
        raise not_found(resource.plural, resource.group, name[1])
    _check_preconditions(resource, name, stored, options)
    if resource.collection == ("", "namespaces") and name[1] in _IMMORTAL_NAMESPACES:
        raise forbidden("namespaces", "", name[1], "this namespace may not be deleted")
    obj = stored.copy()
    meta = obj["metadata"]
    grace = _grace(resource, obj, options)
    _set_propagation(meta, options)
    marked = "deletionTimestamp" in meta
    if not marked or grace < meta.get("deletionGracePeriodSeconds", 0):
        start = cluster.clock()
        if marked:  # a shorter grace counts from the first deletion
            start = min(start, parse_time(meta["deletionTimestamp"]) - meta.get("deletionGracePeriodSeconds", 0))
        meta["deletionTimestamp"] = format_time(start + grace)
        meta["deletionGracePeriodSeconds"] = grace
        if not marked and strategy_of(resource).has_generation:
            meta["generation"] = meta.get("generation", 0) + 1
    if resource.collection == ("", "namespaces"):
        obj.setdefault("status", {})["phase"] = "Terminating"
    gone = metadata.may_go(resource, obj)
    if options.dry_run:
        return freeze(obj, stored.version), gone
    if gone:
        return cluster.store.remove(resource.collection, name), True
    if obj == stored.obj:
        return stored, False
    return cluster.store.put(resource.collection, name, obj), False


def _check_preconditions(resource: Resource, name: Name, stored: Stored, options: DeleteOptions) -> None:
    uid, version = stored.obj["metadata"]["uid"], str(stored.version)
    if options.uid is not None and options.uid != uid:
        why = (
            f"the UID in the precondition ({options.uid}) does not match the UID in record ({uid}). "
            "The object might have been deleted and then recreated"
        )
        raise conflict(resource.kind, resource.group, name[1], why)
    if options.resource_version is not None and options.resource_version != version:
        why = (
            f"the ResourceVersion in the precondition ({options.resource_version}) does not match the ResourceVersion "
            f"in record ({version}). The object might have been modified"
        )
        raise conflict(resource.kind, resource.group, name[1], why)


def _grace(resource: Resource, obj: Json, options: DeleteOptions) -> int:
    if resource.collection != ("", "pods"):
        return 0
    spec = obj["spec"]
    if not spec.get("nodeName") or obj.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    own = spec.get("terminationGracePeriodSeconds", 30)
    wanted = own if options.grace_seconds is None else options.grace_seconds
    held = obj["metadata"].get("deletionGracePeriodSeconds")
    return int(wanted if held is None else min(wanted, held))


def _set_propagation(meta: Json, options: DeleteOptions) -> None:
    wanted = _POLICIES[options.propagation]
    held = [name for name in meta.get("finalizers") or [] if name not in (FOREGROUND, ORPHAN)]
    if wanted:
        held.append(wanted)
    if held:
        meta["finalizers"] = held
    else:
        meta.pop("finalizers", None)
