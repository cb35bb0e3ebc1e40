"""Pure helpers over Kubernetes objects as JSON: names, owners, selectors, quantities, conditions, times."""

import datetime
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from decimal import ROUND_UP, Decimal
from typing import Any, TypeAlias

Object: TypeAlias = dict[str, Any]
"""A Kubernetes object (or a part of one) as decoded JSON."""

ZERO = Decimal(0)

SAFE_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
"""Kubernetes' letters for generated names: no vowels, no look-alikes."""

_QUANTITY = re.compile(r"^([+-]?(?:\d+\.?\d*|\.\d+))(?:([KMGTPE]i)|([numkMGTPE])|[eE]([+-]?\d{1,4}))?$")
_BINARY = {unit: Decimal(1024) ** (i + 1) for i, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))}
_POWERS = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def name_of(obj: Object) -> str:
    """`metadata.name`."""
    return str(obj["metadata"]["name"])


def key_of(obj: Object) -> str:
    """`namespace/name`, or `name` of a cluster-scoped object."""
    namespace = obj["metadata"].get("namespace")
    return f"{namespace}/{obj['metadata']['name']}" if namespace else str(obj["metadata"]["name"])


def version_of(obj: Object) -> int:
    """`metadata.resourceVersion` as a number: guaranteed to compare so since Kubernetes 1.35, always true with etcd."""
    return int(obj["metadata"]["resourceVersion"])


def controller_of(obj: Object) -> Object | None:
    """The owner reference with `controller: true`."""
    return next((ref for ref in obj["metadata"].get("ownerReferences") or () if ref.get("controller")), None)


def is_controlled_by(obj: Object, owner: Object) -> bool:
    """Whether `owner` (by uid) is the object's controller."""
    reference = controller_of(obj)
    return reference is not None and reference.get("uid") == owner["metadata"]["uid"]


def owner_reference(owner: Object, api_version: str, kind: str) -> Object:
    """A controller reference that blocks foreground deletion of `owner`."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "name": name_of(owner),
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def is_deleted(obj: Object) -> bool:
    """Whether deletion has begun."""
    return bool(obj["metadata"].get("deletionTimestamp"))


def labels_of(obj: Object) -> dict[str, str]:
    """`metadata.labels`, empty when absent."""
    return obj["metadata"].get("labels") or {}


def annotations_of(obj: Object) -> dict[str, str]:
    """`metadata.annotations`, empty when absent."""
    return obj["metadata"].get("annotations") or {}


def requirement_matches(requirement: Object, labels: Mapping[str, str]) -> bool:
    """One `matchExpressions` entry of a label or node selector. An unknown operator matches nothing."""
    value, wanted = labels.get(requirement["key"]), requirement.get("values") or []
    match requirement["operator"]:
        case "In":
            return value is not None and value in wanted
        case "NotIn":
            return value is None or value not in wanted
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            try:
                left, right = int(value or ""), int(wanted[0])
            except (ValueError, IndexError):
                return False
            return left > right if operator == "Gt" else left < right
    return False


def selector_matches(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """A LabelSelector (`matchLabels`, `matchExpressions`). None matches nothing, an empty one everything."""
    if selector is None:
        return False
    wanted = selector.get("matchLabels")
    if wanted and not wanted.items() <= labels.items():
        return False
    return all(requirement_matches(r, labels) for r in selector.get("matchExpressions") or ())


def parse_quantity(text: object) -> Decimal:
    """A resource quantity as a number in base units (cores, bytes, devices). Raises ValueError."""
    match = _QUANTITY.match(str(text))
    if match is None:
        raise ValueError(f"not a quantity: {text!r} (expected a number with an optional suffix such as m, Mi or G)")
    number, binary, decimal, exponent = match.groups()
    if binary:
        return Decimal(number) * _BINARY[binary]
    return Decimal(number) * Decimal(10) ** (_POWERS[decimal] if decimal else int(exponent or 0))


def canonical_quantity(text: object) -> str:
    """A quantity as Kubernetes spells it inside resource lists: `1000m` -> `1`, `0.5` -> `500m`, `1024Mi` -> `1Gi`.

    Parts below a thousandth are rounded up; numbers with an exponent stay as they are written."""
    match = _QUANTITY.match(str(text))
    if match is None or match[4] is not None:
        return str(text)
    milli = int((parse_quantity(text) * 1000).to_integral_value(ROUND_UP))
    if match[2] and milli % 1000 == 0:
        number, suffixes, step = milli // 1000, ["", *_BINARY], 1024
    else:
        number, suffixes, step = milli, ["m", "", "k", "M", "G", "T", "P", "E"], 1000
    index = 0
    while number and number % step == 0 and index < len(suffixes) - 1:
        number, index = number // step, index + 1
    return f"{number}{suffixes[index]}" if number else "0"


def is_quantity(text: object) -> bool:
    """Whether `parse_quantity` takes it."""
    return _QUANTITY.match(str(text)) is not None


def resolve_percent(value: int | str, total: int, *, round_up: bool) -> int:
    """An IntOrString: the integer itself or that percentage of `total`."""
    if isinstance(value, int):
        return value
    if not value.endswith("%"):
        return int(value)
    exact = int(value[:-1]) * total
    return -(-exact // 100) if round_up else exact // 100


def pod_requests(pod: Object) -> dict[str, Decimal]:
    """What a pod asks of a node: the larger of its containers' sum and any init container's need.

    Sidecars (init containers with `restartPolicy: Always`) count with the containers and with every later init
    container. A limit without a request counts as the request."""

    def of(container: Object) -> dict[str, Decimal]:
        resources = container.get("resources") or {}
        wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        return {name: parse_quantity(value) for name, value in wanted.items()}

    def add(left: dict[str, Decimal], right: Mapping[str, Decimal]) -> dict[str, Decimal]:
        return {name: left.get(name, ZERO) + right.get(name, ZERO) for name in {*left, *right}}

    sidecars: dict[str, Decimal] = {}
    peak: dict[str, Decimal] = {}
    for container in pod["spec"].get("initContainers") or ():
        need = add(sidecars, of(container))
        peak = {name: max(peak.get(name, ZERO), need.get(name, ZERO)) for name in {*peak, *need}}
        if container.get("restartPolicy") == "Always":
            sidecars = need
    total = sidecars
    for container in pod["spec"]["containers"]:
        total = add(total, of(container))
    return {name: max(peak.get(name, ZERO), total.get(name, ZERO)) for name in {*peak, *total}}


def quota_usage(pods: Iterable[Object]) -> defaultdict[str, Decimal]:
    """What pods that have not finished count against ResourceQuotas: `pods`, `requests.X`, `limits.X`, and cpu and
    memory plain."""
    total: defaultdict[str, Decimal] = defaultdict(Decimal)
    for pod in pods:
        if is_pod_finished(pod):
            continue
        total["pods"] += 1
        total["count/pods"] += 1
        for container in pod["spec"].get("containers") or ():
            resources = container.get("resources") or {}
            for kind in ("requests", "limits"):
                for name, quantity in (resources.get(kind) or {}).items():
                    total[f"{kind}.{name}"] += parse_quantity(quantity)
                    if kind == "requests" and name in ("cpu", "memory"):
                        total[name] += parse_quantity(quantity)
    return total


def is_pod_finished(pod: Object) -> bool:
    """Whether all of its containers ended for good."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def is_pod_active(pod: Object) -> bool:
    """Neither finished nor being deleted: what a ReplicaSet counts."""
    return not is_pod_finished(pod) and not is_deleted(pod)


def condition_of(obj: Object, kind: str) -> Object | None:
    """`status.conditions[type=kind]`."""
    conditions: Iterable[Object] = (obj.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c["type"] == kind), None)


def is_pod_ready(pod: Object) -> bool:
    """Whether its Ready condition is True."""
    condition = condition_of(pod, "Ready")
    return condition is not None and condition["status"] == "True"


def available_in_seconds(pod: Object, min_ready_seconds: int, now: float) -> float | None:
    """0 when the pod has been ready for `min_ready_seconds`; the seconds left until then; None when not ready."""
    condition = condition_of(pod, "Ready")
    if condition is None or condition["status"] != "True":
        return None
    if min_ready_seconds == 0:
        return 0.0
    return max(0.0, parse_time(condition.get("lastTransitionTime")) + min_ready_seconds - now)


def format_time(seconds: float) -> str:
    """Unix seconds as Kubernetes' `metav1.Time` (whole seconds, UTC)."""
    moment = datetime.datetime.fromtimestamp(math.floor(seconds), datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def format_micro_time(seconds: float) -> str:
    """Unix seconds as Kubernetes' `metav1.MicroTime`."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_time(text: str | None) -> float:
    """A `metav1.Time` or `MicroTime` in Unix seconds; 0 when absent."""
    return datetime.datetime.fromisoformat(text).timestamp() if text else 0.0


def safe_hash(text: str) -> str:
    """FNV-1a (32 bits) of `text`, spelt as Kubernetes spells `pod-template-hash`."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return "".join(SAFE_ALPHABET[ord(digit) % len(SAFE_ALPHABET)] for digit in str(value))
