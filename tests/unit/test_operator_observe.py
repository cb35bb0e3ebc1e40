"""Which pods are an LLMDeployment's replicas: labels alone do not make one."""

from typing import Any

import pytest

from pagefleet_operator.conditions import Facts
from pagefleet_operator.history import History
from pagefleet_operator.latency import Latencies
from pagefleet_operator.names import ObjectKey
from pagefleet_operator.observe import observe, targets
from pagefleet_operator.parsing import parse
from pagefleet_operator.plan import Plan
from pagefleet_operator.scrape import Scraper
from pagefleet_operator.settings import ScrapeSettings
from pagefleet_operator.status import render
from pagefleet_operator.store import POD, REPLICA_SET, Store
from support.operator_objects import llmd_body, pod_body, replica_set_body

KEY = ObjectKey("default", "chat")


def seen(*replica_sets: dict[str, Any], **metadata: Any) -> tuple[list[str], list[str], int]:
    """(names of the replicas, addresses that are scraped, ReplicaSets) with one pod whose metadata are changed so."""
    store = Store()
    for body in replica_sets:
        store.put(REPLICA_SET, body)
    pod = pod_body("a")
    pod["metadata"] |= metadata
    store.put(POD, pod)
    found = observe(store, Scraper(ScrapeSettings()), KEY, 0.0, {})
    return [item.name for item in found.pods], [item.ip for item in targets(store)], len(found.replica_sets)


def test_a_pod_of_the_childs_replica_set_is_a_replica() -> None:
    assert seen(replica_set_body()) == (["a"], ["127.0.0.9"], 1)


def test_so_is_one_whose_replica_set_waits_to_be_adopted() -> None:
    orphan = replica_set_body()
    del orphan["metadata"]["ownerReferences"]
    assert seen(orphan)[0] == ["a"]


@pytest.mark.parametrize(
    "references",
    [None, [], [{"kind": "ReplicaSet", "name": "chat-1", "uid": "uid-chat-1"}], [{"kind": "Job", "controller": True}]],
)
def test_a_copy_of_a_pod_is_none(references: Any) -> None:
    """`kubectl debug --copy-to --keep-labels` was counted, scraped, and could be chosen as a victim."""
    assert seen(replica_set_body(), ownerReferences=references) == ([], [], 1)


def test_a_pod_of_an_earlier_replica_set_of_that_name_is_none() -> None:
    again = replica_set_body()
    again["metadata"]["uid"] = "another"
    assert seen(again)[:2] == ([], [])


def test_replicas_of_a_copied_deployment_are_none_and_nothing_goes_back_to_them() -> None:
    assert seen(replica_set_body(deployment="chat-copy")) == ([], [], 0)


def test_a_pod_is_counted_when_its_replica_set_is_seen() -> None:
    """The two come through different watches."""
    assert seen() == ([], [], 0)


def test_evicted_pods_that_lie_about_are_no_part_of_the_fleet_and_hide_no_living_one() -> None:
    """Each counted as a replica that is there, so that one which started was none; 64 of them filled status.pods."""
    store = Store()
    store.put(REPLICA_SET, replica_set_body())
    for number in range(80):
        pod = pod_body(f"evicted-{number}", ready=False, created="2025-01-01T00:00:00Z")
        pod["status"] = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
        store.put(POD, pod)
    store.put(POD, pod_body("serving"))
    store.put(POD, pod_body("new", ready=False))
    found = observe(store, Scraper(ScrapeSettings()), KEY, 0.0, {})
    fleet = found.fleet(2, Latencies())
    assert sorted(pod.name for pod in fleet.pods) == ["new", "serving"]
    assert fleet.starting == 1
    facts = Facts(llmd=parse(llmd_body(spec={"replicas": 2})), observed=found, plan=Plan())
    status = render(facts, History(), [], 0.0)
    assert [row["name"] for row in status["pods"][:3]] == ["new", "serving", "evicted-0"]
    assert (len(status["pods"]), status["replicas"], status["ready"]) == (64, 2, "1/2")
