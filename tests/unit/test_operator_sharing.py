"""A namespace's devices between the loops of one operator."""

from typing import Any

import pytest

from pagefleet_operator.main import operator_settings, parse_arguments
from pagefleet_operator.model import LLMDeployment
from pagefleet_operator.parsing import parse
from pagefleet_operator.sharing import Shares
from pagefleet_operator.specs import Specs
from pagefleet_operator.store import LLMDEPLOYMENT, POD, Store
from support.operator_objects import llmd_body, pod_body


def body(name: str, *, replicas: int, priority: int = 0, **extra: Any) -> dict[str, Any]:
    spec = {
        "replicas": replicas,
        "engine": {"accelerator": {"resourceName": "nvidia.com/gpu"}},
        "autoscaling": {"maxReplicas": 9, "priority": priority},
        **extra,
    }
    return llmd_body(name, spec=spec, uid=f"uid-{name}")


def fill(store: Store, *bodies: dict[str, Any]) -> list[LLMDeployment]:
    for item in bodies:
        store.put(LLMDEPLOYMENT, item)
        for index in range(item["spec"]["replicas"]):
            store.put(POD, pod_body(f"{item['metadata']['name']}-{index}", owner=item["metadata"]["name"]))
    return [parse(item) for item in bodies]


def test_a_namespace_without_a_budget_has_no_bound() -> None:
    store = Store()
    (chat,) = fill(store, body("chat", replicas=1))
    assert Shares({"other": 2}, store, Specs()).allowance(chat) is None


def test_a_deployment_without_devices_has_no_bound() -> None:
    store = Store()
    (chat,) = fill(store, body("chat", replicas=1, engine={}))
    assert Shares({"default": 0}, store, Specs()).allowance(chat) is None


def test_the_last_device_goes_to_the_more_important() -> None:
    store = Store()
    low, high = fill(store, body("batch", replicas=1), body("chat", replicas=1, priority=10))
    shares = Shares({"default": 3}, store, Specs())
    for llmd in (low, high):
        shares.want(llmd.key, 2)
    assert (shares.allowance(low), shares.allowance(high)) == (1, 2)


def test_a_leaving_pod_holds_its_device() -> None:
    store = Store()
    low, high = fill(store, body("batch", replicas=1), body("chat", replicas=1, priority=10))
    store.put(POD, pod_body("batch-leaving", owner="batch", deleting=True))
    shares = Shares({"default": 3}, store, Specs())
    shares.want(high.key, 2)
    assert shares.allowance(high) == 1
    store.drop(POD, pod_body("batch-leaving", owner="batch", resource_version="2"))
    assert shares.allowance(high) == 2
    assert shares.allowance(low) == 1


def test_two_loops_never_get_the_same_device() -> None:
    store = Store()
    one, two = fill(store, body("one", replicas=1), body("two", replicas=1))
    shares = Shares({"default": 3}, store, Specs())
    for llmd in (one, two):
        shares.want(llmd.key, 2)
    assert shares.allowance(one) == 2
    with shares.granting(one.key, 2):
        assert shares.allowance(two) == 1
    assert shares.allowance(two) == 1, "by name: the write failed, and the first is asked first again"


def test_what_is_scaled_by_hand_is_counted_and_left_alone() -> None:
    store = Store()
    manual, chat = fill(store, body("manual", replicas=3), body("chat", replicas=1, priority=10))
    spec = {**body("manual", replicas=3)["spec"], "autoscaling": {"maxReplicas": 9, "mode": "DryRun"}}
    store.put(LLMDEPLOYMENT, {**llmd_body("manual", spec=spec, uid="uid-manual")})
    shares = Shares({"default": 5}, store, Specs())
    shares.want(chat.key, 5)
    assert shares.allowance(chat) == 2
    assert manual.spec.replicas == 3


def test_a_broken_deployment_makes_no_claim_and_a_deleted_one_only_for_its_pods() -> None:
    store = Store()
    leaving = body("leaving", replicas=1, priority=50)
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    chat, _ = fill(store, body("chat", replicas=1), leaving)
    store.put(LLMDEPLOYMENT, llmd_body("broken", spec={"model": {"source": "nonsense"}}, uid="b"))
    shares = Shares({"default": 2}, store, Specs())
    shares.want(chat.key, 2)
    assert shares.allowance(chat) == 1
    store.drop(POD, pod_body("leaving-0", owner="leaving", resource_version="2"))
    assert shares.allowance(chat) == 2
    shares.forget(chat.key)
    assert shares.allowance(chat) == 1


def test_budgets_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = parse_arguments(["--device-budget", "a=3", "--device-budget", "b=0"])
    assert operator_settings(arguments, {}, "a").device_budgets == {"a": 3, "b": 0}
    for wrong in ("a", "=3", "a=", "a=-1", "a=x", "a=²"):
        with pytest.raises(SystemExit):
            parse_arguments(["--device-budget", wrong])
        assert "NAMESPACE=NUMBER" in capsys.readouterr().err
