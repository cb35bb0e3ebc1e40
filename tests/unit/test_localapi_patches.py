"""JSON, merge and strategic merge patches, as functions."""

import copy
from typing import Any

import pytest

from pagefleet_localcluster.api.builtin_types import builtin_types
from pagefleet_localcluster.api.errors import ApiError
from pagefleet_localcluster.api.patches import MAX_JSON_PATCH_OPERATIONS, json_patch, merge_patch, strategic_patch

POD_SPEC = builtin_types().schema("PodSpec")


@pytest.mark.parametrize(
    ("value", "patch", "want"),
    [
        pytest.param({"a": 1}, {"b": 2}, {"a": 1, "b": 2}, id="adds"),
        pytest.param({"a": 1, "b": 2}, {"a": None}, {"b": 2}, id="null removes"),
        pytest.param({"a": 1}, {"b": None}, {"a": 1}, id="null for an absent field"),
        pytest.param({"a": {"b": 1, "c": 2}}, {"a": {"b": None}}, {"a": {"c": 2}}, id="goes into objects"),
        pytest.param({"a": [1, 2]}, {"a": [3]}, {"a": [3]}, id="lists are replaced"),
        pytest.param({"a": 1}, {"a": {"b": {"c": None}}}, {"a": {"b": {}}}, id="a new object keeps no nulls"),
    ],
)
def test_merge_patch(value: Any, patch: Any, want: Any) -> None:
    before = copy.deepcopy(value)
    assert merge_patch(value, patch) == want
    assert value == before


def _spec(*names: str) -> dict[str, Any]:
    return {"containers": [{"name": name, "image": f"{name}:1"} for name in names]}


@pytest.mark.parametrize(
    ("value", "patch", "want"),
    [
        pytest.param(
            _spec("a", "b"),
            {"containers": [{"name": "b", "image": "b:2"}]},
            {"containers": [{"name": "a", "image": "a:1"}, {"name": "b", "image": "b:2"}]},
            id="a keyed list merges by its key",
        ),
        pytest.param(
            _spec("a"), {"containers": [{"name": "c"}]}, {"containers": [{"name": "c"}, *_spec("a")["containers"]]},
            id="an unknown key comes first",
        ),
        pytest.param(
            _spec("a", "b"), {"containers": [{"name": "a", "$patch": "delete"}]}, _spec("b"), id="delete an item"
        ),
        pytest.param(
            _spec("a", "b"), {"containers": [{"$patch": "replace"}, {"name": "z"}]}, {"containers": [{"name": "z"}]},
            id="replace a keyed list",
        ),
        pytest.param(
            _spec("a", "b"), {"$setElementOrder/containers": [{"name": "b"}, {"name": "a"}]}, _spec("b", "a"),
            id="order a keyed list",
        ),
        pytest.param(
            {"containers": [{"name": "a", "command": ["x", "y"]}]},
            {"containers": [{"name": "a", "command": ["z"]}]},
            {"containers": [{"name": "a", "command": ["z"]}]},
            id="an atomic list is replaced",
        ),
        pytest.param(
            {"nodeSelector": {"a": "1"}},
            {"nodeSelector": {"$patch": "replace", "b": "2"}},
            {"nodeSelector": {"b": "2"}},
            id="replace a map",
        ),
        pytest.param({"volumes": [{"name": "v", "emptyDir": {}}]}, {"volumes": None}, {}, id="null removes"),
        pytest.param(
            {"volumes": [{"name": "v", "emptyDir": {}}]},
            {"volumes": [{"name": "v", "$retainKeys": ["name", "hostPath"], "hostPath": {"path": "/d"}}]},
            {"volumes": [{"name": "v", "hostPath": {"path": "/d"}}]},
            id="retainKeys drops what it does not name",
        ),
        pytest.param(
            {"containers": [{"name": "a", "ports": [{"containerPort": 80, "name": "http"}]}]},
            {"containers": [{"name": "a", "ports": [{"containerPort": 81}]}]},
            {"containers": [{"name": "a", "ports": [{"containerPort": 81}, {"containerPort": 80, "name": "http"}]}]},
            id="ports merge by containerPort",
        ),
    ],
)  # fmt: skip
def test_strategic_patch(value: Any, patch: Any, want: Any) -> None:
    before = copy.deepcopy(value)
    assert strategic_patch(value, patch, POD_SPEC) == want
    assert value == before


def test_strategic_patch_merges_sets_and_deletes_from_them() -> None:
    schema = builtin_types().schema("ObjectMeta")
    assert strategic_patch({"finalizers": ["a"]}, {"finalizers": ["b", "a"]}, schema) == {"finalizers": ["a", "b"]}
    patch = {"$deleteFromPrimitiveList/finalizers": ["a"]}
    assert strategic_patch({"finalizers": ["a", "b"]}, patch, schema) == {"finalizers": ["b"]}


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"containers": [{"image": "x"}]}, "merge key: name"),
        ({"containers": ["text"]}, "merge key: name"),
        ({"$patch": "sideways"}, "sideways"),
    ],
)
def test_strategic_patch_says_what_is_wrong(patch: Any, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        strategic_patch(_spec("a"), patch, POD_SPEC)
    assert caught.value.code == 400
    assert message in caught.value.message


@pytest.mark.parametrize(
    "operations",
    [
        pytest.param([{"op": "test", "path": "/a", "value": 2}], id="a test that fails"),
        pytest.param([{"op": "remove", "path": "/b"}], id="a missing path"),
        pytest.param([{"op": "replace", "path": "/a/b/c", "value": 1}], id="a path through a number"),
        pytest.param([{"op": "unknown", "path": "/a"}], id="an unknown operation"),
        pytest.param([{"path": "/a"}], id="no operation"),
        pytest.param(["text"], id="an operation that is text"),
        pytest.param([{"op": "add", "path": "/list/9", "value": 1}], id="an index out of range"),
        pytest.param([{"op": "add", "path": "a", "value": 1}], id="a pointer without slash"),
    ],
)
def test_json_patch_that_does_not_fit_is_422(operations: Any) -> None:
    with pytest.raises(ApiError) as caught:
        json_patch({"a": 1, "list": []}, operations)
    assert caught.value.code == 422


def test_json_patch_applies_in_order_and_leaves_its_input_alone() -> None:
    value = {"a": 1, "list": [1]}
    operations = [
        {"op": "test", "path": "/a", "value": 1},
        {"op": "replace", "path": "/a", "value": 2},
        {"op": "add", "path": "/list/-", "value": 2},
        {"op": "move", "from": "/a", "path": "/b"},
    ]
    assert json_patch(value, operations) == {"b": 2, "list": [1, 2]}
    assert value == {"a": 1, "list": [1]}


def test_json_patch_bounds_its_operations() -> None:
    with pytest.raises(ApiError) as caught:
        json_patch({}, [{"op": "add", "path": "/a", "value": 1}] * (MAX_JSON_PATCH_OPERATIONS + 1))
    assert caught.value.code == 413
