"""The operator's own metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pagefleet_operator.fleet_metrics import FleetMetrics


class Telemetry:
    """One registry per process; every series is created at zero."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix = "pagefleet_operator_"
        self.leader = Gauge(prefix + "leader", "1 while this process holds its leases.", registry=self.registry)
        self.objects = Gauge(prefix + "objects", "LLMDeployments that are served.", registry=self.registry)
        self.reconciles = Counter(prefix + "reconciles", "Reconciles by result.", ["result"], registry=self.registry)
        for result in ("ok", "conflict", "error"):
            self.reconciles.labels(result)
        self.reconcile_seconds = Histogram(
            prefix + "reconcile_seconds",
            "Time of one reconcile.",
            buckets=(0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5, 20),
            registry=self.registry,
        )
        self.api_requests = Counter(
            prefix + "api_requests", "Answers of the API server.", ["method", "code"], registry=self.registry
        )
        self.scrape_seconds = Histogram(
            prefix + "scrape_round_seconds",
            "Time of one scrape round over all pods.",
            buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5),
            registry=self.registry,
        )
        self.silent_pods = Gauge(prefix + "silent_pods", "Pods whose last scrape failed.", registry=self.registry)
        self.scalings = Counter(
            prefix + "scalings", "Changes of spec.replicas by direction.", ["direction"], registry=self.registry
        )
        for direction in ("up", "down"):
            self.scalings.labels(direction)
        self.missed_events = Counter(
            prefix + "missed_watch_events", "Changes that only a resync showed.", registry=self.registry
        )
        self.loop_lag_seconds = Gauge(
            prefix + "loop_lag_seconds", "How late the event loop last was.", registry=self.registry
        )
        self.writes_waiting = Gauge(
            prefix + "writes_waiting",
            "Objects' turns to write that the write budget holds back.",
            registry=self.registry,
        )
        self.writes_busiest_second = Gauge(
            prefix + "writes_busiest_second", "The most writes sent in any second so far.", registry=self.registry
        )
        self.fleet = FleetMetrics()
        """What the served objects are."""
        self.registry.register(self.fleet)

    def render(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.registry)
