"""Where a Service's traffic goes, and how its EndpointSlices read."""

from pagefleet_localcluster.controllers.backends import backends_of, target_port
from pagefleet_localcluster.controllers.endpoints import slices_of
from support.localcluster_builders import pod, service


def test_only_ready_pods_that_stay_get_traffic() -> None:
    pods = [
        pod("a", address="127.64.0.1"),
        pod("b", ready=False),
        pod("c", deleted=True),
        pod("d", phase="Succeeded"),
        pod("e", labels={"app": "other"}),
        pod("f", address=""),
    ]
    got = backends_of(service(target=8000), pods)
    assert [(b.pod["metadata"]["name"], b.ready) for b in got] == [("a", True), ("b", False), ("c", False)]


def test_named_target_ports_are_resolved_pod_by_pod() -> None:
    pods = [pod("a", ports={"http": 8000}), pod("b", ports={"http": 9000}), pod("c", ports={"grpc": 1})]
    got = backends_of(service(target="http"), pods)
    assert [b.ports for b in got] == [(("http", 8000, "TCP"),), (("http", 9000, "TCP"),)]


def test_without_target_port_the_port_itself() -> None:
    assert target_port({"port": 80}, pod()) == 80


def test_a_sidecar_may_hold_the_port() -> None:
    p = pod(initContainers=[{"name": "s", "restartPolicy": "Always", "ports": [{"name": "http", "containerPort": 7}]}])
    assert target_port({"port": 80, "targetPort": "http"}, p) == 7


def test_a_service_without_selector_selects_nothing() -> None:
    assert backends_of(service(selector=None), [pod()]) == []


def test_not_ready_addresses_can_be_published() -> None:
    assert [b.ready for b in backends_of(service(publishNotReadyAddresses=True), [pod(ready=False)])] == [True]


def test_slices_group_by_port_numbers() -> None:
    pods = [
        pod("a", address="127.64.0.1", ports={"http": 8000}),
        pod("b", address="127.64.0.2", ports={"http": 8000}, ready=False),
        pod("c", address="127.64.0.3", ports={"http": 9000}),
    ]
    slices = slices_of(service(target="http"), backends_of(service(target="http"), pods))
    assert [([e["addresses"][0] for e in one["endpoints"]], [p["port"] for p in one["ports"]]) for one in slices] == [
        (["127.64.0.1", "127.64.0.2"], [8000]),
        (["127.64.0.3"], [9000]),
    ]


def test_slices_tell_serving_and_terminating() -> None:
    pods = [pod("a", deleted=True), pod("b", ready=False), pod("c")]
    [one] = slices_of(service(target=8000), backends_of(service(target=8000), pods))
    assert [e["conditions"] for e in one["endpoints"]] == [
        {"ready": False, "serving": True, "terminating": True},
        {"ready": False, "serving": False, "terminating": False},
        {"ready": True, "serving": True, "terminating": False},
    ]
    assert one["metadata"]["labels"]["kubernetes.io/service-name"] == "web"


def test_a_service_without_pods_has_one_empty_slice() -> None:
    assert [s["endpoints"] for s in slices_of(service(), [])] == [[]]
