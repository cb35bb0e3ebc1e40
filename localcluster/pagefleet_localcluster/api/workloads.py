"""Pods and the workloads that hold pod templates: computed defaults and checks."""

import json
import re
from collections.abc import Iterator
from typing import Any

from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.errors import Cause
from pagefleet_localcluster.api.metadata import LABEL, LABEL_TEXT, check_annotations, check_labels
from pagefleet_localcluster.api.validation import show
from pagefleet_localcluster.objects import selector_matches

Json = dict[str, Any]
_TOLERATION_SECONDS = 300
_MUTABLE_POD_FIELDS = ("activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds", "nodeName")


def containers_of(spec: Json) -> Iterator[tuple[str, Json]]:
    """(path, container) of a pod spec, init containers included."""
    for field in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(field) or ()):
            yield f"{field}[{index}]", container


def _prepare_pod_spec(spec: Json) -> None:
    for _, container in containers_of(spec):
        tag = container.get("image", "").rpartition("/")[2].partition(":")[2]
        container.setdefault("imagePullPolicy", "Always" if tag in ("", "latest") else "IfNotPresent")
    if spec.get("serviceAccountName"):
        spec.setdefault("serviceAccount", spec["serviceAccountName"])


def prepare_pod(_cluster: Cluster, obj: Json, old: Json | None) -> None:
    """Defaults of the pod itself, and its first status."""
    spec = obj["spec"]
    _prepare_pod_spec(spec)
    if old is not None:
        return
    for _, container in containers_of(spec):
        if limits := container["resources"].get("limits"):
            container["resources"]["requests"] = limits | container["resources"].get("requests", {})
    spec.setdefault("enableServiceLinks", True)
    obj["status"] = {"phase": "Pending", "qosClass": qos_class(spec)}


def complete_pod(_cluster: Cluster, obj: Json) -> None:
    """What admission adds: priority, and tolerance of a node that is away for a while."""
    spec = obj["spec"]
    spec.setdefault("priority", 0)
    spec.setdefault("preemptionPolicy", "PreemptLowerPriority")
    tolerations = spec.setdefault("tolerations", [])
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if not any(t.get("key") in (key, None) and t.get("effect") in ("NoExecute", None) for t in tolerations):
            tolerations.append(
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _TOLERATION_SECONDS}
            )


def qos_class(spec: Json) -> str:
    """Guaranteed, Burstable or BestEffort, from CPU and memory of all containers."""
    wanted: list[Json] = []
    guaranteed = True
    for _, container in containers_of(spec):
        resources = container.get("resources") or {}
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        wanted.append({k: v for k, v in {**limits, **requests}.items() if k in ("cpu", "memory")})
        guaranteed &= all(name in limits and requests.get(name) == limits[name] for name in ("cpu", "memory"))
    if not any(wanted):
        return "BestEffort"
    return "Guaranteed" if guaranteed else "Burstable"


def prepare_deployment(_cluster: Cluster, obj: Json, _old: Json | None) -> None:
    """The rolling update's defaults, and the template's."""
    spec = obj["spec"]
    strategy = spec["strategy"]
    if strategy["type"] == "RollingUpdate":
        rolling = strategy.setdefault("rollingUpdate", {})
        rolling.setdefault("maxUnavailable", "25%")
        rolling.setdefault("maxSurge", "25%")
    _prepare_template(spec)


def prepare_replica_set(_cluster: Cluster, obj: Json, _old: Json | None) -> None:
    """The template's defaults; a status that always shows the count."""
    _prepare_template(obj["spec"])
    obj.setdefault("status", {}).setdefault("replicas", 0)


def _prepare_template(spec: Json) -> None:
    if isinstance(spec.get("template"), dict) and isinstance(spec["template"].get("spec"), dict):
        _prepare_pod_spec(spec["template"]["spec"])


def check_workload(obj: Json, old: Json | None) -> list[Cause]:
    """Selector and template fit each other, the template is a valid pod, the selector never changes."""
    spec = obj["spec"]
    selector, template = spec["selector"], spec.get("template") or {}
    metadata = template.get("metadata") or {}
    labels = metadata.get("labels") or {}
    causes = _check_counts(spec, ("replicas",))
    causes += check_labels(labels, "spec.template.labels")  # so a real server names them
    causes += check_annotations(metadata.get("annotations") or {}, "spec.template.annotations")
    if not selector.get("matchLabels") and not selector.get("matchExpressions"):
        text = f"Invalid value: {show(selector)}: empty selector is invalid for {obj['kind'].lower()}"
        causes.append(Cause(field="spec.selector", message=text))
    elif not selector_matches(selector, labels):
        text = f"Invalid value: {show(labels or None)}: `selector` does not match template `labels`"
        causes.append(Cause(field="spec.template.metadata.labels", message=text))
    pod = template.get("spec") or {}
    causes += _check_pod_spec(pod, "spec.template.spec")
    if pod.get("restartPolicy") != "Always":
        text = f'Unsupported value: {json.dumps(pod.get("restartPolicy"))}: supported values: "Always"'
        path = "spec.template.spec.restartPolicy"
        causes.append(Cause(field=path, message=text, reason="FieldValueNotSupported"))
    strategy = spec.get("strategy") or {}
    rolling = strategy.get("rollingUpdate")
    if rolling and strategy.get("type") == "Recreate":
        text = "Forbidden: may not be specified when strategy `type` is 'Recreate'"
        causes.append(Cause(field="spec.strategy.rollingUpdate", message=text, reason="FieldValueForbidden"))
    elif rolling:
        causes += _check_rolling_update(rolling)
    if old is not None and old["spec"]["selector"] != selector:
        text = f"Invalid value: {show(selector)}: field is immutable"
        causes.append(Cause(field="spec.selector", message=text))
    return causes + _check_counts(spec, ("minReadySeconds", "revisionHistoryLimit", "progressDeadlineSeconds"))


def _check_counts(spec: Json, names: tuple[str, ...]) -> list[Cause]:
    text = "Invalid value: {}: must be greater than or equal to 0"
    counts = [(name, spec[name]) for name in names if isinstance(spec.get(name), int)]
    return [Cause(field=f"spec.{name}", message=text.format(count)) for name, count in counts if count < 0]


def check_count_or_percent(value: Any, field: str) -> list[Cause]:
    """Faults of an int-or-percent such as maxSurge."""
    if isinstance(value, str) and not re.fullmatch(r"[0-9]+%", value):
        text = (
            f"Invalid value: {show(value)}: a valid percent string must be a numeric string followed by an ending '%' "
            "(e.g. '1%',  or '93%', regex used for validation is '[0-9]+%')"
        )
        return [Cause(field=field, message=text)]
    if isinstance(value, int) and value < 0:
        return [Cause(field=field, message=f"Invalid value: {value}: must be greater than or equal to 0")]
    return []


def _check_rolling_update(rolling: Json) -> list[Cause]:
    path = "spec.strategy.rollingUpdate"
    surge, unavailable = rolling.get("maxSurge", 0), rolling.get("maxUnavailable", 0)
    causes = check_count_or_percent(unavailable, f"{path}.maxUnavailable")
    causes += check_count_or_percent(surge, f"{path}.maxSurge")
    if not causes and {str(surge).rstrip("%"), str(unavailable).rstrip("%")} == {"0"}:
        text = "Invalid value: 0: may not be 0 when `maxSurge` is 0"
        causes.append(Cause(field=f"{path}.maxUnavailable", message=text))
    return causes


def check_budget(obj: Json, _old: Json | None) -> list[Cause]:
    """A PodDisruptionBudget counts one way only, in pods or in percent."""
    spec = obj["spec"]
    if "minAvailable" in spec and "maxUnavailable" in spec:
        text = f"Invalid value: {show(spec)}: minAvailable and maxUnavailable cannot be both set"
        return [Cause(field="spec", message=text)]
    names = [name for name in ("minAvailable", "maxUnavailable") if name in spec]
    return [cause for name in names for cause in check_count_or_percent(spec[name], f"spec.{name}")]


def check_pod(obj: Json, old: Json | None) -> list[Cause]:
    """A pod's own spec; on update only a few fields may change."""
    causes = _check_pod_spec(obj["spec"], "spec")
    if old is not None and _fixed(obj["spec"]) != _fixed(old["spec"]):
        text = (
            "Forbidden: pod updates may not change fields other than `spec.containers[*].image`,"
            "`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to "
            "existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was "
            "previously negative)"
        )
        causes.append(Cause(field="spec", message=text, reason="FieldValueForbidden"))
    return causes


def _fixed(spec: Json) -> Json:
    kept = {key: value for key, value in spec.items() if key not in _MUTABLE_POD_FIELDS}
    for field in ("containers", "initContainers"):
        if field in kept:
            kept[field] = [{k: v for k, v in c.items() if k not in ("image", "imagePullPolicy")} for c in kept[field]]
    return kept


def _check_pod_spec(spec: Json, path: str) -> list[Cause]:
    causes = []
    if not spec.get("containers"):
        causes.append(Cause(field=f"{path}.containers", message="Required value", reason="FieldValueRequired"))
    volumes = {volume.get("name") for volume in spec.get("volumes") or ()}
    for where, container in containers_of(spec):
        at = f"{path}.{where}"
        if not re.fullmatch(LABEL, str(container["name"])) or len(container["name"]) > 63:
            text = f"Invalid value: {show(container['name'])}: {LABEL_TEXT}"
            causes.append(Cause(field=f"{at}.name", message=text))
        if not container.get("image"):
            causes.append(Cause(field=f"{at}.image", message="Required value", reason="FieldValueRequired"))
        for index, port in enumerate(container.get("ports") or ()):
            field, number = f"{at}.ports[{index}].containerPort", port["containerPort"]
            if number == 0:
                causes.append(Cause(field=field, message="Required value", reason="FieldValueRequired"))
            elif not 0 < number < 65536:
                text = f"Invalid value: {number}: must be between 1 and 65535, inclusive"
                causes.append(Cause(field=field, message=text))
        for index, mount in enumerate(container.get("volumeMounts") or ()):
            if mount.get("name") not in volumes:
                text = f'Not found: "{mount.get("name")}"'
                field = f"{at}.volumeMounts[{index}].name"
                causes.append(Cause(field=field, message=text, reason="FieldValueNotFound"))
    return causes
