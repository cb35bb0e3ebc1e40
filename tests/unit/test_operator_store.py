"""What the store shows when watches, lists and our own writes come in any order."""

from typing import Any

import pytest

from pagefleet_operator.names import ObjectKey
from pagefleet_operator.store import LLMDEPLOYMENT, POD, Store
from support.operator_objects import llmd_body, pod_body

KEY = ObjectKey("default", "chat")


def body(version: int, uid: str = "u") -> dict[str, Any]:
    made = llmd_body(uid=uid)
    made["metadata"]["resourceVersion"] = str(version)
    return made


def version(store: Store) -> str | None:
    found = store.get(LLMDEPLOYMENT, KEY)
    return None if found is None else found["metadata"]["resourceVersion"]


def test_an_older_event_never_hides_a_newer_state() -> None:
    store = Store()
    store.put(LLMDEPLOYMENT, body(5))
    store.put(LLMDEPLOYMENT, body(3))
    assert version(store) == "5"


def test_an_object_made_anew_replaces_the_old_one() -> None:
    store = Store()
    store.put(LLMDEPLOYMENT, body(5, "old"))
    store.put(LLMDEPLOYMENT, body(7, "new"))
    store.drop(LLMDEPLOYMENT, body(6, "old"))
    assert version(store) == "7"


@pytest.mark.parametrize("late", [3, 5, 6])
@pytest.mark.parametrize("made_anew", [False, True])
def test_a_reply_that_comes_after_the_objects_end_brings_nothing_back(late: int, made_anew: bool) -> None:
    store = Store()
    store.put(LLMDEPLOYMENT, body(2, "old"))
    store.drop(LLMDEPLOYMENT, body(6, "old"))
    if made_anew:
        store.put(LLMDEPLOYMENT, body(7, "new"))
    store.put(LLMDEPLOYMENT, body(late, "old"))
    assert version(store) == ("7" if made_anew else None)
    store.put(LLMDEPLOYMENT, body(8, "third"))
    assert version(store) == "8"


def test_a_list_brings_what_the_watch_missed() -> None:
    store = Store()
    store.put(LLMDEPLOYMENT, body(5))
    assert store.behind(LLMDEPLOYMENT, [body(6)], None, "8") == {KEY}
    store.replace(LLMDEPLOYMENT, [body(6)], None, "8")
    assert version(store) == "6"
    store.replace(LLMDEPLOYMENT, [], "default", "9")
    assert version(store) is None


def test_a_list_takes_nothing_back_that_happened_after_it() -> None:
    store = Store()
    store.put(LLMDEPLOYMENT, body(10))
    assert store.behind(LLMDEPLOYMENT, [body(5)], None, "8") == set()
    assert store.behind(LLMDEPLOYMENT, [], None, "8") == set(), "created after the list"
    store.drop(LLMDEPLOYMENT, body(12))
    store.replace(LLMDEPLOYMENT, [body(10)], None, "11")
    assert version(store) is None, "deleted after the list"


def test_a_list_of_one_namespace_leaves_the_others_alone() -> None:
    store = Store()
    store.put(LLMDEPLOYMENT, body(5))
    store.replace(LLMDEPLOYMENT, [], "elsewhere", "9")
    assert version(store) == "5"


def test_pods_are_found_by_their_owner_and_follow_their_label() -> None:
    store = Store()
    assert store.put(POD, pod_body("a", owner="chat"))
    store.put(POD, pod_body("b", owner="other"))
    assert [item["metadata"]["name"] for item in store.owned(POD, KEY)] == ["a"]
    moved = pod_body("a", owner="other", resource_version="2")
    store.put(POD, moved)
    assert store.owned(POD, KEY) == []
    store.drop(POD, moved)
    assert [item["metadata"]["name"] for item in store.owned(POD, ObjectKey("default", "other"))] == ["b"]


def test_the_highest_version_seen_counts_deletions_too() -> None:
    store = Store()
    store.put(LLMDEPLOYMENT, body(5))
    store.drop(LLMDEPLOYMENT, body(9))
    assert store.highest == 9
    store.clear()
    assert (store.highest, version(store)) == (0, None)


def test_a_body_is_news_unless_it_is_known_older_or_of_something_gone() -> None:
    """What is no news wakes nobody; the newest spelling of the same version is kept."""
    store = Store()
    assert store.put(POD, pod_body("a", resource_version="5"))
    again = pod_body("a", resource_version="5")
    assert not store.put(POD, again)
    assert store.get(POD, ObjectKey("default", "a")) is again
    assert not store.put(POD, pod_body("a", resource_version="4"))
    assert store.put(POD, pod_body("a", resource_version="6"))
    store.drop(POD, pod_body("a", resource_version="7"))
    assert not store.put(POD, pod_body("a", resource_version="6"))
    unversioned = pod_body("b", resource_version="")
    assert store.put(POD, unversioned)
    assert store.put(POD, unversioned), "without a version nothing can be known to be the same"
