"""Writes a Service's EndpointSlices from its pods."""

from collections.abc import Sequence

from pagefleet_localcluster.client import ENDPOINT_SLICES, ApiError, Client
from pagefleet_localcluster.controllers.backends import Backend, backends_of
from pagefleet_localcluster.objects import (
    Object,
    is_deleted,
    is_pod_ready,
    labels_of,
    name_of,
    owner_reference,
    safe_hash,
)
from pagefleet_localcluster.reflector import Reflector

SERVICE_NAME_LABEL = "kubernetes.io/service-name"
MANAGED_BY_LABEL = "endpointslice.kubernetes.io/managed-by"
MANAGER = "endpointslice-controller.k8s.io"


class EndpointsController:
    """Reconciles the endpoints of one Service at a time.

    A real API server refuses loopback addresses there (422): the Service is then left without them."""

    def __init__(self, client: Client, services: Reflector, pods: Reflector, slices: Reflector) -> None:
        self._client = client
        self._services = services
        self._pods = pods
        self._slices = slices

    async def reconcile(self, key: str) -> float | None:
        """One synchronisation of the Service `key`."""
        service = self._services.objects.get(key)
        if service is None or is_deleted(service) or not service["spec"].get("selector"):
            return None
        backends = backends_of(service, self._pods.objects.values())
        try:
            await self._write_slices(service, slices_of(service, backends))
        except ApiError as error:
            if error.code != 422:
                raise
        return None

    async def _write_slices(self, service: Object, wanted: list[Object]) -> None:
        namespace = service["metadata"]["namespace"]
        existing = {
            name_of(obj): obj
            for obj in list(self._slices.objects.values())
            if obj["metadata"]["namespace"] == namespace
            and labels_of(obj).get(SERVICE_NAME_LABEL) == name_of(service)
            and labels_of(obj).get(MANAGED_BY_LABEL) == MANAGER
        }
        for body in wanted:
            old = existing.pop(name_of(body), None)
            if old is None:
                self._slices.record(await self._client.create(ENDPOINT_SLICES, body, namespace))
            elif (old.get("endpoints") or []) != body["endpoints"]:
                replaced = {**old, "endpoints": body["endpoints"]}
                self._slices.record(await self._client.replace(ENDPOINT_SLICES, replaced))
        for name in existing:
            await self._client.delete(ENDPOINT_SLICES, name, namespace)


def slices_of(service: Object, backends: Sequence[Backend]) -> list[Object]:
    """The EndpointSlices of a Service: one for each set of port numbers (one empty slice without pods)."""
    groups: dict[tuple[tuple[str, int, str], ...], list[Object]] = {}
    for backend in backends:
        ready, terminating = is_pod_ready(backend.pod), is_deleted(backend.pod)
        groups.setdefault(backend.ports, []).append(
            {
                "addresses": [backend.pod["status"]["podIP"]],
                "conditions": {"ready": backend.ready, "serving": ready, "terminating": terminating},
                "nodeName": backend.pod["spec"].get("nodeName"),
                "targetRef": _reference(backend.pod),
            }
        )
    uid = service["metadata"]["uid"]
    return [
        {
            "metadata": {
                "name": f"{name_of(service)}-{safe_hash(f'{uid}{ports}')[-5:]}",
                "namespace": service["metadata"]["namespace"],
                "labels": {**labels_of(service), SERVICE_NAME_LABEL: name_of(service), MANAGED_BY_LABEL: MANAGER},
                "ownerReferences": [owner_reference(service, "v1", "Service")],
            },
            "addressType": "IPv4",
            "endpoints": endpoints,
            "ports": [_port(port) for port in ports],
        }
        for ports, endpoints in sorted(groups.items() or [((), [])], key=lambda group: group[0])
    ]


def _port(port: tuple[str, int, str]) -> Object:
    name, number, protocol = port
    return {"name": name, "port": number, "protocol": protocol}


def _reference(pod: Object) -> Object:
    metadata = pod["metadata"]
    return {"kind": "Pod", "name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]}
