"""Where a Service's traffic goes: its ports resolved against its pods. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from pagefleet_localcluster.objects import Object, is_deleted, is_pod_finished, is_pod_ready, labels_of


@dataclass(frozen=True)
class Backend:
    """One pod behind a Service."""

    pod: Object
    ready: bool
    """Whether new connections may go to it."""
    ports: tuple[tuple[str, int, str], ...]
    """(name, number, protocol) of each Service port that the pod resolves."""


def select_pods(service: Object, pods: Iterable[Object]) -> list[Object]:
    """The Service's pods that have an address and have not finished. No selector selects none."""
    selector = service["spec"].get("selector")
    namespace = service["metadata"]["namespace"]
    return [
        pod
        for pod in pods
        if selector
        and pod["metadata"]["namespace"] == namespace
        and selector.items() <= labels_of(pod).items()
        and (pod.get("status") or {}).get("podIP")
        and not is_pod_finished(pod)
    ]


def target_port(service_port: Object, pod: Object) -> int | None:
    """The number behind `targetPort` (a number, or a container port's name); None when the pod has no such name."""
    target = service_port.get("targetPort") or service_port["port"]
    if isinstance(target, int):
        return target
    sidecars = [c for c in pod["spec"].get("initContainers") or () if c.get("restartPolicy") == "Always"]
    for container in [*pod["spec"]["containers"], *sidecars]:
        for port in container.get("ports") or ():
            same_protocol = port.get("protocol", "TCP") == service_port.get("protocol", "TCP")
            if port.get("name") == target and same_protocol:
                return int(port["containerPort"])
    return None


def backends_of(service: Object, pods: Iterable[Object]) -> list[Backend]:
    """Every selected pod, in the order of names; pods that resolve no port of the Service are left out."""
    always = bool(service["spec"].get("publishNotReadyAddresses"))
    result = []
    for pod in sorted(select_pods(service, pods), key=lambda pod: str(pod["metadata"]["name"])):
        ports = tuple(
            (port.get("name", ""), number, port.get("protocol", "TCP"))
            for port in service["spec"].get("ports") or ()
            if (number := target_port(port, pod)) is not None
        )
        ready = always or (is_pod_ready(pod) and not is_deleted(pod))
        if ports or not service["spec"].get("ports"):
            result.append(Backend(pod, ready, ports))
    return result
