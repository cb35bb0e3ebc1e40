"""Every served object as metrics: what `kubectl get llmd` shows, made when it is asked for, gone with the object.

Labels are `llmdeployment_namespace` and `llmdeployment`; a label `namespace` would be renamed by Prometheus, which
gives each target its own.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagefleet_operator.names import ObjectKey

Body = Mapping[str, Any]
LABELS = ("llmdeployment_namespace", "llmdeployment")
PREFIX = "pagefleet_operator_"
RULES = ("KVBlocks", "Queue", "Objective", "Standing")
"""Rules that change replicas. Counted from zero: a series that begins at 1 has not increased."""
BLOCK_STATES = ("used", "cached", "total", "waiting")


class FleetMetrics(Collector):
    """Reads the objects of a leader; a standby has none, so that nothing is counted twice."""

    def __init__(self) -> None:
        self.bodies: Callable[[], Iterable[Body]] = tuple
        """Latest bodies of the served objects."""
        self._decisions: Counter[tuple[ObjectKey, str]] = Counter()

    def decided(self, key: ObjectKey, rule: str) -> None:
        """A change of the wanted replicas, by the rule that won."""
        self._decisions[key, rule] += 1

    def collect(self) -> Iterable[Metric]:
        """All families, also without any object."""
        bodies = {_key(body): body for body in self.bodies()}
        yield from _Gauges().of(bodies)
        decisions = CounterMetricFamily(
            PREFIX + "decisions", "Changes of the wanted replicas, by the rule that won.", labels=(*LABELS, "rule")
        )
        for key, rule in [known for known in self._decisions if known[0] not in bodies]:
            del self._decisions[key, rule]
        scaled = {(key, rule) for key, body in bodies.items() if _scales(body) for rule in RULES}
        for key, rule in sorted(scaled | set(self._decisions)):
            decisions.add_metric((*key, rule), self._decisions.get((key, rule), 0))
        yield decisions


class _Gauges:
    """The gauges of one scrape."""

    def __init__(self) -> None:
        self._wanted = _gauge("replicas_wanted", "spec.replicas.")
        self._ready = _gauge("replicas_ready", "Replicas that answer requests.")
        self._min = _gauge("replicas_min", "autoscaling.minReplicas; absent without autoscaling.")
        self._max = _gauge("replicas_max", "autoscaling.maxReplicas; absent without autoscaling.")
        self._blocks = _gauge("kv_blocks", "KV-cache blocks over all replicas with fresh samples.", "state")
        self._running = _gauge("requests_running", "Requests that run, over all replicas with fresh samples.")
        self._waiting = _gauge("requests_waiting", "Requests that wait, over all replicas with fresh samples.")
        self._attainment = _gauge(
            "slo_attainment_ratio", "Share of the last minute's requests within the objective; absent without one."
        )
        self._condition = _gauge("condition", "1 while the condition is True, 0 while it is not.", "type")

    def of(self, bodies: Mapping[ObjectKey, Body]) -> list[Metric]:
        for key, body in sorted(bodies.items()):
            self._spec(key, body.get("spec") or {})
            self._status(key, body.get("status") or {})
        return [value for value in vars(self).values() if isinstance(value, Metric)]

    def _spec(self, key: ObjectKey, spec: Body) -> None:
        _set(self._wanted, key, spec.get("replicas"))
        scaling = spec.get("autoscaling")
        if scaling:
            _set(self._min, key, scaling.get("minReplicas"))
            _set(self._max, key, scaling.get("maxReplicas"))

    def _status(self, key: ObjectKey, status: Body) -> None:
        _set(self._ready, key, status.get("readyReplicas", 0))
        blocks, requests = status.get("kvBlocks") or {}, status.get("requests") or {}
        for state in BLOCK_STATES:
            _set(self._blocks, key, blocks.get(state), state)
        _set(self._running, key, requests.get("running"))
        _set(self._waiting, key, requests.get("waiting"))
        attainment = str((status.get("slo") or {}).get("attainment", "")).removesuffix("%")
        if attainment.isdigit():
            _set(self._attainment, key, int(attainment) / 100)
        for condition in status.get("conditions") or []:
            _set(self._condition, key, int(condition.get("status") == "True"), str(condition.get("type")))


def _scales(body: Body) -> bool:
    return bool((body.get("spec") or {}).get("autoscaling"))


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=(*LABELS, *labels))


def _set(gauge: GaugeMetricFamily, key: ObjectKey, value: float | None, *labels: str) -> None:
    if isinstance(value, int | float):
        gauge.add_metric((*key, *labels), value)


def _key(body: Body) -> ObjectKey:
    return ObjectKey(body["metadata"]["namespace"], body["metadata"]["name"])
