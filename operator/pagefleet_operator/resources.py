"""Kinds of the API that the operator touches, as their URLs name them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from pagefleet_operator import names


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object."""

    group: str
    version: str
    plural: str

    @property
    def root(self) -> str:
        """URL path of its API group."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """URL path of a collection, an object or a subresource; namespace None: over all namespaces."""
        place = f"/namespaces/{namespace}" if namespace is not None else ""
        return "".join([self.root, place, f"/{self.plural}", *(f"/{part}" for part in (name, subresource) if part)])


LLMDEPLOYMENTS = Resource(names.GROUP, names.VERSION, names.PLURAL)
PODS = Resource("", "v1", "pods")
REPLICA_SETS = Resource("apps", "v1", "replicasets")
EVENTS = Resource("", "v1", "events")
LEASES = Resource("coordination.k8s.io", "v1", "leases")

CHILDREN: Mapping[str, Resource] = {
    "ServiceAccount": Resource("", "v1", "serviceaccounts"),
    "Service": Resource("", "v1", "services"),
    "PodDisruptionBudget": Resource("policy", "v1", "poddisruptionbudgets"),
    "PersistentVolumeClaim": Resource("", "v1", "persistentvolumeclaims"),
    "NetworkPolicy": Resource("networking.k8s.io", "v1", "networkpolicies"),
    "Deployment": Resource("apps", "v1", "deployments"),
}
"""Children by kind: each is called like its LLMDeployment."""

POD_MONITOR = "PodMonitor"
POD_MONITORS = Resource("monitoring.coreos.com", "v1", "podmonitors")
"""A child of a kind that a cluster may lack, so that nothing watches it: it is listed at each resync."""

EVERY_CHILD: Mapping[str, Resource] = {**CHILDREN, POD_MONITOR: POD_MONITORS}

REMOVABLE = ("NetworkPolicy", POD_MONITOR)
"""Children that go when the spec no longer wants them; a claim holds data and goes with its LLMDeployment."""
