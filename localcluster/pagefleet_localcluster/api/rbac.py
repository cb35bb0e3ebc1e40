"""Who may do what: users known by static tokens, and the rules that their role bindings give them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.errors import ApiError

Json = dict[str, Any]
_GROUP = "rbac.authorization.k8s.io"
ADMINISTRATORS = "system:masters"


@dataclass(frozen=True)
class User:
    """One who holds a token."""

    name: str
    """Also `system:serviceaccount:NAMESPACE:NAME`."""
    groups: tuple[str, ...] = ()
    """`system:masters` may do everything."""


ANONYMOUS = User("system:anonymous")
"""Who shows no token."""


def groups_of(user: User) -> tuple[str, ...]:
    """The user's own groups and the one that everybody is in."""
    return (*user.groups, "system:unauthenticated" if user is ANONYMOUS else "system:authenticated")


@dataclass(frozen=True, kw_only=True)
class Access:
    """What somebody wants to do."""

    verb: str
    """get, list, watch, create, update, patch, delete or deletecollection."""
    group: str
    resource: str
    """Plural, with its subresource: `pods/log`."""
    namespace: str = ""
    """Empty: cluster scope."""
    name: str = ""


def verb_of(method: str, *, named: bool, watching: bool) -> str:
    """The verb of a request."""
    if method in ("GET", "HEAD"):
        return "get" if named else "watch" if watching else "list"
    if method == "DELETE":
        return "delete" if named else "deletecollection"
    return {"POST": "create", "PUT": "update", "PATCH": "patch"}.get(method, method.lower())


def is_allowed(cluster: Cluster, user: User, access: Access) -> bool:
    """Whether any rule of the user's roles covers the access."""
    if ADMINISTRATORS in user.groups:
        return True
    return any(_covers(rule, access) for rule in _rules(cluster, user, access.namespace))


def check_access(cluster: Cluster, user: User, access: Access) -> None:
    """Raises ApiError 403 in Kubernetes' words when the user may not."""
    if is_allowed(cluster, user, access):
        return
    plural = access.resource.partition("/")[0]
    qualified = f"{plural}.{access.group}" if access.group else plural
    where = f'in the namespace "{access.namespace}"' if access.namespace else "at the cluster scope"
    subject = f'{qualified} "{access.name}"' if access.name else qualified
    text = (
        f'{subject} is forbidden: User "{user.name}" cannot {access.verb} resource "{access.resource}" '
        f'in API group "{access.group}" {where}'
    )
    details = {"name": access.name, "group": access.group, "kind": plural}
    raise ApiError(403, "Forbidden", text, details={key: value for key, value in details.items() if value})


def _rules(cluster: Cluster, user: User, namespace: str) -> Iterator[Json]:
    for stored in cluster.store.all((_GROUP, "clusterrolebindings")):
        if _binds(stored.obj, user, ""):
            yield from _role_rules(cluster, stored.obj["roleRef"], "")
    if namespace:
        for stored in cluster.store.all((_GROUP, "rolebindings"), namespace):
            if _binds(stored.obj, user, namespace):
                yield from _role_rules(cluster, stored.obj["roleRef"], namespace)


def _binds(binding: Json, user: User, namespace: str) -> bool:
    for subject in binding.get("subjects") or ():
        name = subject.get("name")
        match subject.get("kind"):
            case "User" if name == user.name:
                return True
            case "Group" if name in groups_of(user):
                return True
            case "ServiceAccount":
                if user.name == f"system:serviceaccount:{subject.get('namespace') or namespace}:{name}":
                    return True
    return False


def _role_rules(cluster: Cluster, reference: Json, namespace: str) -> Iterable[Json]:
    cluster_wide = reference.get("kind") == "ClusterRole"
    plural, where = ("clusterroles", "") if cluster_wide else ("roles", namespace)
    found = cluster.store.get((_GROUP, plural), (where, reference["name"]))
    return found.obj.get("rules") or () if found is not None else ()


def _covers(rule: Json, access: Access) -> bool:
    subresource = access.resource.partition("/")[2]
    resources = rule.get("resources") or ()
    if not _has(rule.get("verbs"), access.verb) or not _has(rule.get("apiGroups"), access.group):
        return False
    if not _has(resources, access.resource) and not (subresource and f"*/{subresource}" in resources):
        return False
    names = rule.get("resourceNames") or ()
    return not names or access.name in names


def _has(values: Any, wanted: str) -> bool:
    return bool(values) and ("*" in values or wanted in values)
