"""The operator's /metrics shows every served object, and forgets it when it goes."""

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pagefleet_operator.names import ObjectKey
from pagefleet_operator.telemetry import Telemetry

CHAT = ObjectKey("team", "chat")


def body(name: str = "chat", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "team", "name": name},
        "spec": {"replicas": 3, "autoscaling": {"minReplicas": 1, "maxReplicas": 8}},
        "status": {
            "readyReplicas": 2,
            "kvBlocks": {"used": 60, "cached": 20, "total": 100, "waiting": 12},
            "requests": {"running": 9, "waiting": 4},
            "slo": {"attainment": "97%"},
            "conditions": [{"type": "Degraded", "status": "False"}, {"type": "SLOMet", "status": "True"}],
        }
        | status,
    }


def series(telemetry: Telemetry) -> dict[tuple[str, ...], float]:
    """(name without prefix, values of the further labels) → value, of the object chat."""
    found = {}
    for family in text_string_to_metric_families(telemetry.render().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if labels.pop("llmdeployment", None) == "chat" and labels.pop("llmdeployment_namespace") == "team":
                found[(sample.name.removeprefix("pagefleet_operator_"), *labels.values())] = sample.value
    return found


def test_an_object_is_shown_whole() -> None:
    telemetry = Telemetry()
    telemetry.fleet.bodies = lambda: [body()]
    telemetry.fleet.decided(CHAT, "KVBlocks")
    telemetry.fleet.decided(CHAT, "KVBlocks")
    assert series(telemetry) == {
        ("replicas_wanted",): 3,
        ("replicas_ready",): 2,
        ("replicas_min",): 1,
        ("replicas_max",): 8,
        ("kv_blocks", "used"): 60,
        ("kv_blocks", "cached"): 20,
        ("kv_blocks", "total"): 100,
        ("kv_blocks", "waiting"): 12,
        ("requests_running",): 9,
        ("requests_waiting",): 4,
        ("slo_attainment_ratio",): 0.97,
        ("condition", "Degraded"): 0,
        ("condition", "SLOMet"): 1,
        ("decisions_total", "KVBlocks"): 2,
        ("decisions_total", "Queue"): 0,
        ("decisions_total", "Objective"): 0,
        ("decisions_total", "Standing"): 0,
    }


def test_what_is_not_known_is_absent_and_never_zero() -> None:
    telemetry = Telemetry()
    young = {"metadata": {"namespace": "team", "name": "chat"}, "spec": {"replicas": 1}}
    telemetry.fleet.bodies = lambda: [young]
    assert series(telemetry) == {("replicas_wanted",): 1, ("replicas_ready",): 0}


def test_an_object_that_is_gone_leaves_nothing_behind() -> None:
    telemetry = Telemetry()
    telemetry.fleet.bodies = lambda: [body()]
    telemetry.fleet.decided(CHAT, "Queue")
    assert series(telemetry)
    telemetry.fleet.bodies = lambda: [body("other")]
    assert series(telemetry) == {}
    telemetry.fleet.bodies = lambda: [body()]
    assert series(telemetry)["decisions_total", "Queue"] == 0, "a new object of that name begins anew"


def test_a_standby_shows_no_object() -> None:
    assert series(Telemetry()) == {}
