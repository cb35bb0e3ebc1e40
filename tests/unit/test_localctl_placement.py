"""Which node the scheduler picks, and its words when none fits."""

import pytest

from pagefleet_localcluster.controllers.placement import place
from pagefleet_localcluster.objects import Object
from support.localcluster_builders import node, pod

NO_VICTIMS = "No preemption victims found for incoming pod"
NO_HELP = "Preemption is not helpful for scheduling"


def gpu_pod(name: str = "new", count: int = 1, on: str | None = None) -> Object:
    return pod(name, node=on, limits={"nvidia.com/gpu": str(count)})


@pytest.mark.parametrize(
    ("case", "nodes", "placed", "wanted", "want"),
    [
        ("no nodes", [], [], pod(node=None), "no nodes available to schedule pods"),
        (
            "every GPU taken",
            [node(gpus=1)],
            [gpu_pod("old", on="n0")],
            gpu_pod(),
            "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. "
            f"preemption: 0/1 nodes are available: 1 {NO_VICTIMS}.",
        ),
        (
            "more GPUs than any node has",
            [node(gpus=1)],
            [],
            gpu_pod(count=2),
            "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. "
            f"preemption: 0/1 nodes are available: 1 {NO_HELP}.",
        ),
        (
            "several reasons, in order",
            [node("a", gpus=1), node("b", labels={"x": "y"}, ready=False), node("c", unschedulable=True), node("d")],
            [gpu_pod("old", on="a")],
            gpu_pod(),
            "0/4 nodes are available: 1 node(s) had untolerated taint(s), 1 node(s) were unschedulable, "
            "2 Insufficient nvidia.com/gpu. preemption: 0/4 nodes are available: "
            f"1 {NO_VICTIMS}, 3 {NO_HELP}.",
        ),
        (
            "no node has the label",
            [node()],
            [],
            pod(node=None, nodeSelector={"gpu": "a100"}),
            "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector. "
            f"preemption: 0/1 nodes are available: 1 {NO_HELP}.",
        ),
    ],
)
def test_unschedulable(case: str, nodes: list[Object], placed: list[Object], wanted: Object, want: str) -> None:
    got = place(wanted, nodes, placed)
    assert (got.node, got.message) == (None, want), case


def test_replicas_spread_over_nodes() -> None:
    nodes = [node("a"), node("b")]
    first = pod("1", node="a", owner="rs")
    assert place(pod("2", node=None, owner="rs"), nodes, [first]).node == "b"


def test_otherwise_the_emptier_node_is_taken() -> None:
    nodes = [node("a"), node("b")]
    busy = pod("1", node="a", requests={"cpu": "3"})
    assert place(pod("2", node=None), nodes, [busy]).node == "b"


def test_finished_pods_use_nothing() -> None:
    done = pod("1", node="n0", phase="Succeeded", limits={"nvidia.com/gpu": "1"})
    assert place(gpu_pod(), [node(gpus=1)], [done]).node == "n0"


@pytest.mark.parametrize(
    ("case", "toleration", "fits"),
    [
        ("same key, value and effect", {"key": "gpu", "value": "yes", "effect": "NoSchedule"}, True),
        ("any value", {"key": "gpu", "operator": "Exists"}, True),
        ("anything", {"operator": "Exists"}, True),
        ("another value", {"key": "gpu", "value": "no"}, False),
        ("another effect", {"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, False),
    ],
)
def test_taints(case: str, toleration: Object, fits: bool) -> None:
    tainted = node(taints=[{"key": "gpu", "value": "yes", "effect": "NoSchedule"}])
    assert (place(pod(node=None, tolerations=[toleration]), [tainted], []).node == "n0") is fits, case


def test_required_node_affinity() -> None:
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    wanted = pod(node=None, affinity={"nodeAffinity": required})
    nodes = [node("a", labels={"zone": "a"}), node("b", labels={"zone": "b"})]
    assert place(wanted, nodes, []).node == "b"


def test_required_anti_affinity_over_hosts() -> None:
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "web"}}}
    wanted = pod(node=None, affinity={"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}})
    got = place(wanted, [node()], [pod("other", node="n0")])
    assert got.message.startswith("0/1 nodes are available: 1 node(s) didn't match pod anti-affinity rules.")


def test_init_containers_count_by_their_largest_and_sidecars_on_top() -> None:
    wanted = pod(node=None, requests={"cpu": "2"})
    wanted["spec"]["initContainers"] = [
        {"name": "side", "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}},
        {"name": "init", "resources": {"requests": {"cpu": "1"}}},
    ]
    assert place(wanted, [node(cpus=3)], []).node == "n0"
    assert place(wanted, [node(cpus=2)], []).node is None
