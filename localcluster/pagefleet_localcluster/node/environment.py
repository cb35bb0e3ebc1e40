"""A container's environment, command and arguments from its spec. Pure."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal

from pagefleet_localcluster.objects import Object, annotations_of, labels_of, parse_quantity

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")
_SUBSCRIPT = re.compile(r"^metadata\.(labels|annotations)\['([^']+)'\]$")
_ENV_NAME = re.compile(r"^[A-Za-z_.-][A-Za-z0-9_.-]*$")


class ConfigProblem(Exception):
    """A container cannot be created from its spec: becomes `CreateContainerConfigError` with this message."""


@dataclass(frozen=True)
class PodFacts:
    """What environment variables may refer to."""

    pod: Object
    address: str
    host_address: str
    allocatable: Mapping[str, str]
    """The node's, for resource fields without a limit."""
    config: Mapping[tuple[str, str], Mapping[str, str] | None]
    """("ConfigMap" | "Secret", name) -> decoded data; None when there is no such object."""
    services: Mapping[str, str]
    """Variables of the namespace's Services."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)`; `$$` stands for `$`; an unknown name stays as it is written."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        return "$" if name is None else variables.get(name, match.group(0))

    return _REFERENCE.sub(replace, text)


def environment_of(
    container: Object, facts: PodFacts, base: Mapping[str, str], rewrite: Callable[[str], str]
) -> dict[str, str]:
    """All variables: `base`, then Services', then envFrom, then env in order. `rewrite` maps paths in plain values.

    Raises ConfigProblem."""
    variables = {**base, **facts.services}
    for source in container.get("envFrom") or ():
        for kind, key in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if (reference := source.get(key)) is None:
                continue
            for name, value in _data(facts, kind, reference).items():
                if _ENV_NAME.match(name):
                    variables[source.get("prefix", "") + name] = value
    for entry in container.get("env") or ():
        found = _value(entry, container, facts)
        if found is not None:
            variables[entry["name"]] = rewrite(expand(found, variables) if "value" in entry else found)
    return variables


def argv_of(container: Object, variables: Mapping[str, str], rewrite: Callable[[str], str]) -> list[str]:
    """command + args with references expanded and paths rewritten."""
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    return [rewrite(expand(word, variables)) for word in words]


def service_variables(services: list[Object]) -> dict[str, str]:
    """What `enableServiceLinks` puts into every container: NAME_SERVICE_HOST, NAME_PORT and so on."""
    variables: dict[str, str] = {}
    for service in services:
        address = service["spec"].get("clusterIP") or "None"
        ports = service["spec"].get("ports") or ()
        if address == "None" or not ports:
            continue
        prefix = str(service["metadata"]["name"]).upper().replace("-", "_")
        variables[f"{prefix}_SERVICE_HOST"] = address
        variables[f"{prefix}_SERVICE_PORT"] = str(ports[0]["port"])
        variables[f"{prefix}_PORT"] = f"{ports[0].get('protocol', 'TCP').lower()}://{address}:{ports[0]['port']}"
        for port in ports:
            if port.get("name"):
                variables[f"{prefix}_SERVICE_PORT_{port['name'].upper().replace('-', '_')}"] = str(port["port"])
            protocol = port.get("protocol", "TCP")
            stem = f"{prefix}_PORT_{port['port']}_{protocol}"
            variables[stem] = f"{protocol.lower()}://{address}:{port['port']}"
            variables |= {f"{stem}_PROTO": protocol.lower(), f"{stem}_PORT": str(port["port"]), f"{stem}_ADDR": address}
    return variables


def field_of(path: str, facts: PodFacts) -> str:
    """A `fieldRef`. Raises ConfigProblem for a path that pods do not offer."""
    pod = facts.pod
    if match := _SUBSCRIPT.match(path):
        source = labels_of(pod) if match.group(1) == "labels" else annotations_of(pod)
        return source.get(match.group(2), "")
    if path in ("metadata.labels", "metadata.annotations"):
        source = labels_of(pod) if path.endswith("labels") else annotations_of(pod)
        return "\n".join(f'{key}="{value}"' for key, value in sorted(source.items()))
    simple = {
        "metadata.name": pod["metadata"]["name"],
        "metadata.namespace": pod["metadata"]["namespace"],
        "metadata.uid": pod["metadata"]["uid"],
        "spec.nodeName": pod["spec"].get("nodeName", ""),
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", "default"),
        "status.podIP": facts.address,
        "status.podIPs": facts.address,
        "status.hostIP": facts.host_address,
        "status.hostIPs": facts.host_address,
    }
    if path not in simple:
        raise ConfigProblem(f"unsupported fieldPath: {path}")
    return str(simple[path])


def resource_of(reference: Object, container: Object, facts: PodFacts) -> str:
    """A `resourceFieldRef` of the container (or of another one of the pod), in units of its divisor, rounded up."""
    name = reference.get("containerName")
    if name and name != container["name"]:
        everyone = [*facts.pod["spec"]["containers"], *(facts.pod["spec"].get("initContainers") or ())]
        container = next((c for c in everyone if c["name"] == name), {})
        if not container:
            raise ConfigProblem(f"container {name} not found")
    kind, _, resource = str(reference["resource"]).partition(".")
    quantity = ((container.get("resources") or {}).get(kind) or {}).get(resource)
    if quantity is None:
        quantity = facts.allocatable.get(resource, "0") if kind == "limits" else "0"
    divisor = parse_quantity(reference.get("divisor") or "1") or Decimal(1)
    return str(math.ceil(parse_quantity(quantity) / divisor))


def _value(entry: Object, container: Object, facts: PodFacts) -> str | None:
    """The value of an `env` entry; None leaves the variable out (an optional source that is absent)."""
    source = entry.get("valueFrom")
    if source is None:
        return str(entry.get("value") or "")
    if field := source.get("fieldRef"):
        return field_of(field["fieldPath"], facts)
    if resource := source.get("resourceFieldRef"):
        return resource_of(resource, container, facts)
    for kind, key in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
        if reference := source.get(key):
            data = _data(facts, kind, reference)
            if reference["key"] in data:
                return data[reference["key"]]
            if reference.get("optional"):
                return None
            where = f"{facts.pod['metadata']['namespace']}/{reference['name']}"
            raise ConfigProblem(f"couldn't find key {reference['key']} in {kind} {where}")
    raise ConfigProblem(f"env {entry['name']}: valueFrom {sorted(source)} is not supported")


def _data(facts: PodFacts, kind: str, reference: Object) -> Mapping[str, str]:
    data = facts.config.get((kind, reference["name"]))
    if data is not None:
        return data
    if reference.get("optional"):
        return {}
    raise ConfigProblem(f'{kind.lower()} "{reference["name"]}" not found')
