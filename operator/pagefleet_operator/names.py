"""Names that other people depend on: the API group, labels, annotations, ports, and how children are called."""

import re
from typing import NamedTuple

GROUP = "pagefleet.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LLMDeployment"
PLURAL = "llmdeployments"

FIELD_MANAGER = "pagefleet-operator"
"""Owner of our fields in server-side apply, and the reporting component of our Events."""

LABEL_APP = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_OWNER = f"{GROUP}/llmdeployment"
APP_NAME = "pagefleet-server"

TEMPLATE_HASH = f"{GROUP}/template-hash"
"""Annotation of the pod template: which wish of ours it is."""

POD_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Well-known annotation: a ReplicaSet that shrinks takes the pods with the lowest cost first."""

LEASE = "pagefleet-operator"
"""Lease that the serving operator holds in every namespace it serves."""

CONTAINER = "server"
PORT_NAME = "http"
SERVER_PORT = 8000

MAX_NAME_LENGTH = 45
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""A DNS-1035 label: the name becomes a Service's."""


class ObjectKey(NamedTuple):
    """Which object, within one kind."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def is_valid_name(name: str) -> bool:
    """Whether an LLMDeployment may be called so."""
    return len(name) <= MAX_NAME_LENGTH and re.fullmatch(NAME_PATTERN, name) is not None


def labels(name: str) -> dict[str, str]:
    """Labels of every child of the LLMDeployment `name`."""
    return {
        LABEL_APP: APP_NAME,
        LABEL_INSTANCE: name,
        LABEL_MANAGED_BY: FIELD_MANAGER,
        LABEL_OWNER: name,
    }


def selector(name: str) -> dict[str, str]:
    """The part of the labels that selects pods; immutable once a Deployment exists."""
    return {LABEL_APP: APP_NAME, LABEL_OWNER: name}


def selector_string(name: str) -> str:
    """`selector` in the form of `status.selector` and of list requests."""
    return ",".join(f"{key}={value}" for key, value in sorted(selector(name).items()))
