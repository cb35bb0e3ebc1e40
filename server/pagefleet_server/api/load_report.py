"""The load of this replica in a response header, for routers that balance by it (ORCA's endpoint-load-metrics)."""

import json
from typing import Final

from pagefleet_server.api.gauges import GaugeView

REQUEST_HEADER: Final = "endpoint-load-metrics-format"
RESPONSE_HEADER: Final = "endpoint-load-metrics"


def report_load(form: str, view: GaugeView) -> str | None:
    """The header's value in the form that was asked for (TEXT or JSON), None for another one."""
    metrics = {"kv_cache_usage_perc": view.usage, "num_requests_waiting": float(view.waiting)}
    match form.strip().upper():
        case "TEXT":
            return "TEXT " + ", ".join(f"named_metrics.{name}={value:g}" for name, value in metrics.items())
        case "JSON":
            return "JSON " + json.dumps({"named_metrics": metrics})
    return None
