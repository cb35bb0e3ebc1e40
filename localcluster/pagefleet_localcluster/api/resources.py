"""The resources that are served: one `Resource` each, and the registry that finds them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pagefleet_localcluster.api.builtin_types import builtin_types
from pagefleet_localcluster.api.schema import Schema
from pagefleet_localcluster.api.store import Collection

ALL_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
CRD_VERBS = ("delete", "deletecollection", "get", "list", "patch", "create", "update", "watch")


@dataclass(frozen=True)
class ScalePaths:
    """Where a resource keeps what the scale subresource shows, as paths without the leading dot."""

    spec: tuple[str, ...] = ("spec", "replicas")
    status: tuple[str, ...] = ("status", "replicas")
    selector: tuple[str, ...] | None = None
    """None: taken from `spec.selector` (built-in workloads)."""


@dataclass(frozen=True, kw_only=True)
class Resource:
    """One resource in one version."""

    group: str
    version: str
    plural: str
    kind: str
    schema: Schema = field(repr=False)
    singular: str = ""
    list_kind: str = ""
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ALL_VERBS
    has_status: bool = False
    scale: ScalePaths | None = None
    fields: frozenset[str] = frozenset()
    """What field selectors may name, besides metadata.name and metadata.namespace."""
    custom: bool = False
    """Defined by a CRD."""
    rules: Schema | None = field(default=None, repr=False)
    """The branches of a custom schema that carry CEL rules; None without any."""
    columns: tuple[dict[str, Any], ...] = ()
    """additionalPrinterColumns of a CRD's version."""
    storage_version: str = ""
    """The version that objects are stored in; empty: this one."""

    @property
    def api_version(self) -> str:
        """`apps/v1`, or `v1` for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def stored_api_version(self) -> str:
        """The apiVersion that stored objects carry."""
        return f"{self.group}/{self.storage_version}" if self.storage_version else self.api_version

    @property
    def collection(self) -> Collection:
        """Where the objects are kept."""
        return (self.group, self.plural)

    @property
    def qualified(self) -> str:
        """`deployments.apps`, or `pods` for the core group."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


def _builtin(api_version: str, plural: str, kind: str, *, short: str = "", fields: str = "", **more: Any) -> Resource:
    group, _, version = api_version.rpartition("/")
    return Resource(
        group=group,
        version=version,
        plural=plural,
        kind=kind,
        singular=kind.lower(),
        list_kind=f"{kind}List",
        schema=builtin_types().schema(kind),
        short_names=tuple(short.split()),
        fields=frozenset(fields.split()),
        **more,
    )


_RBAC = "rbac.authorization.k8s.io/v1"
_OBJECT_FIELDS = "kind namespace name uid apiVersion resourceVersion fieldPath"
_EVENT_FIELDS = " ".join(f"involvedObject.{name}" for name in _OBJECT_FIELDS.split()) + " reason type source"
_POD_FIELDS = "spec.nodeName spec.restartPolicy spec.schedulerName spec.serviceAccountName status.phase status.podIP"


def builtin_resources() -> tuple[Resource, ...]:
    """Everything that is served before the first CRD."""
    b = _builtin
    scale = ScalePaths()
    return (
        b("v1", "namespaces", "Namespace", short="ns", fields="status.phase", has_status=True, namespaced=False,
          verbs=tuple(verb for verb in ALL_VERBS if verb != "deletecollection")),
        b("v1", "nodes", "Node", short="no", fields="spec.unschedulable", has_status=True, namespaced=False),
        b("v1", "pods", "Pod", short="po", fields=_POD_FIELDS, has_status=True, categories=("all",)),
        b("v1", "services", "Service", short="svc", fields="spec.clusterIP spec.type", has_status=True,
          categories=("all",)),
        b("v1", "configmaps", "ConfigMap", short="cm"),
        b("v1", "secrets", "Secret", fields="type"),
        b("v1", "serviceaccounts", "ServiceAccount", short="sa"),
        b("v1", "events", "Event", short="ev", fields=_EVENT_FIELDS),
        b("v1", "persistentvolumeclaims", "PersistentVolumeClaim", short="pvc", has_status=True),
        b("v1", "resourcequotas", "ResourceQuota", short="quota", has_status=True),
        b("apps/v1", "deployments", "Deployment", short="deploy", has_status=True, scale=scale, categories=("all",)),
        b("apps/v1", "replicasets", "ReplicaSet", short="rs", fields="status.replicas", has_status=True, scale=scale,
          categories=("all",)),
        b("discovery.k8s.io/v1", "endpointslices", "EndpointSlice"),
        b("coordination.k8s.io/v1", "leases", "Lease"),
        b("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy", short="netpol"),
        b("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget", short="pdb", has_status=True),
        b(_RBAC, "roles", "Role"),
        b(_RBAC, "rolebindings", "RoleBinding"),
        b(_RBAC, "clusterroles", "ClusterRole", namespaced=False),
        b(_RBAC, "clusterrolebindings", "ClusterRoleBinding", namespaced=False),
        b("storage.k8s.io/v1", "storageclasses", "StorageClass", short="sc", namespaced=False),
        b("scheduling.k8s.io/v1", "priorityclasses", "PriorityClass", short="pc", namespaced=False),
        b("apiextensions.k8s.io/v1", "customresourcedefinitions", "CustomResourceDefinition", short="crd crds",
          has_status=True, categories=("api-extensions",), namespaced=False),
    )  # fmt: skip


class Registry:
    """Finds resources by group, version and plural, and by kind."""

    def __init__(self, resources: Iterable[Resource]) -> None:
        self._found: dict[tuple[str, str, str], Resource] = {}
        for resource in resources:
            self.add(resource)

    def add(self, resource: Resource) -> None:
        """Serves a resource, in place of one of the same name."""
        self._found[resource.group, resource.version, resource.plural] = resource

    def remove(self, group: str, plural: str) -> None:
        """Stops serving every version of a resource."""
        for key in [key for key in self._found if (key[0], key[2]) == (group, plural)]:
            del self._found[key]

    def get(self, group: str, version: str, plural: str) -> Resource | None:
        """The resource at this path, if there is one."""
        return self._found.get((group, version, plural))

    def all(self) -> list[Resource]:
        """Every resource served."""
        return list(self._found.values())

    def by_collection(self, collection: Collection) -> Resource | None:
        """The resource (in the version that is stored) that holds a collection."""
        found = [r for r in self._found.values() if r.collection == collection]
        stored = [r for r in found if r.version == r.storage_version]
        return next(iter(stored or found), None)

    def groups(self) -> dict[str, list[str]]:
        """Versions by named group, in the order in which they came."""
        groups: dict[str, list[str]] = {}
        for resource in self._found.values():
            versions = groups.setdefault(resource.group, [])
            if resource.version not in versions:
                versions.append(resource.version)
        return groups
