"""Pruning, defaulting, validation, CEL: a schema's work on one object."""

import copy
from typing import Any

import pytest

from pagefleet_localcluster.api.builtin_types import builtin_types
from pagefleet_localcluster.api.cel_rules import run_rules
from pagefleet_localcluster.api.errors import invalid
from pagefleet_localcluster.api.schema import apply_defaults, drop_empty, drop_nulls, prune
from pagefleet_localcluster.api.validation import validate

OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def test_pruning_names_every_unknown_field() -> None:
    schema = _object(
        a={"type": "array", "items": _object(b={"type": "string"})},
        m={"type": "object", "additionalProperties": _object(c={"type": "integer"})},
        o=OPEN,
    )
    obj = {
        "kind": "K",
        "metadata": {"any": 1},
        "a": [{"b": "x", "z": 1}],
        "m": {"k": {"c": 1, "y": 2}},
        "o": {"free": {"form": 1}},
        "w": 1,
    }
    assert sorted(prune(obj, schema)) == ["a[0].z", "m.k.y", "w"]
    assert obj == {
        "kind": "K",
        "metadata": {"any": 1},
        "a": [{"b": "x"}],
        "m": {"k": {"c": 1}},
        "o": {"free": {"form": 1}},
    }


def test_defaults_fill_nested_objects_and_leave_others_alone() -> None:
    schema = _object(
        engine=_object(size={"type": "integer", "default": 16}) | {"default": {}},
        off=_object(size={"type": "integer", "default": 1}),
        items={"type": "array", "items": _object(n={"type": "string", "default": "x"})},
        null_is_absent={"type": "integer", "default": 3},
        null_is_a_value={"type": "integer", "default": 4, "nullable": True},
    )
    obj: dict[str, Any] = {"items": [{}, {"n": "y"}], "null_is_absent": None, "null_is_a_value": None}
    apply_defaults(obj, schema)
    assert obj == {
        "engine": {"size": 16},
        "items": [{"n": "x"}, {"n": "y"}],
        "null_is_absent": 3,
        "null_is_a_value": None,
    }


def test_defaults_are_not_shared_between_objects() -> None:
    schema = _object(engine={"type": "object", "default": {"list": []}})
    one: dict[str, Any] = {}
    other: dict[str, Any] = {}
    apply_defaults(one, schema)
    apply_defaults(other, schema)
    one["engine"]["list"].append(1)
    assert other == {"engine": {"list": []}}


def test_builtin_objects_carry_neither_nulls_nor_empty_collections() -> None:
    pod = {
        "metadata": {"labels": {}, "annotations": None},
        "spec": {"tolerations": [], "volumes": [{"name": "v", "emptyDir": {}}], "securityContext": {}},
    }
    drop_nulls(pod, builtin_types().schema("Pod"))
    drop_empty(pod, builtin_types().schema("Pod"))
    assert pod == {"metadata": {}, "spec": {"volumes": [{"name": "v", "emptyDir": {}}], "securityContext": {}}}


@pytest.mark.parametrize(
    ("schema", "value", "want"),
    [
        ({"type": "integer"}, True, 'x: Invalid value: "boolean": x in body must be of type integer: "boolean"'),
        ({"type": "integer"}, 1.5, 'x: Invalid value: "number": x in body must be of type integer: "number"'),
        ({"type": "string"}, None, 'x: Invalid value: "null": x in body must be of type string: "null"'),
        ({"type": "integer", "minimum": 2}, 1, "x: Invalid value: 1: x in body should be greater than or equal to 2"),
        ({"type": "integer", "maximum": 2}, 3, "x: Invalid value: 3: x in body should be less than or equal to 2"),
        (
            {"type": "integer", "maximum": 2, "exclusiveMaximum": True},
            2,
            "x: Invalid value: 2: x in body should be less than 2",
        ),
        ({"type": "integer", "multipleOf": 8}, 9, "x: Invalid value: 9: x in body should be a multiple of 8"),
        ({"type": "string", "maxLength": 2}, "abc", "x: Too long: may not be more than 2 bytes"),
        (
            {"type": "string", "minLength": 1},
            "",
            'x: Invalid value: "": x in body should be at least 1 chars long',
        ),
        ({"type": "string", "pattern": "^a+$"}, "aa\n", 'x: Invalid value: "aa\\n": x in body should match \'^a+$\''),
        ({"type": "string", "enum": ["a", "b"]}, "c", 'x: Unsupported value: "c": supported values: "a", "b"'),
        ({"type": "array", "maxItems": 1}, [1, 2], "x: Too many: 2: must have at most 1 items"),
        (
            {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
            ["a", "a"],
            'x[1]: Duplicate value: "a"',
        ),
        (
            {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"], "items": OPEN},
            [{"k": 1}, {"k": 1}],
            'x[1]: Duplicate value: {"k":1}',
        ),
        (
            {"x-kubernetes-int-or-string": True},
            [],
            'x: Invalid value: "array": x in body must be of type integer,string: "array"',
        ),
        (
            {"type": "string", "format": "date-time"},
            "yesterday",
            'x: Invalid value: "yesterday": x in body must be of type date-time: "yesterday"',
        ),
        (
            {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            [],
            "x: Invalid value: []: x in body must validate at least one schema (anyOf)",
        ),
        ({"not": {"type": "string"}}, "a", 'x: Invalid value: "a": x in body must not validate the schema (not)'),
    ],
)  # fmt: skip
def test_faults_in_kubernetes_words(schema: dict[str, Any], value: Any, want: str) -> None:
    [cause] = validate({"x": value}, _object(x=schema))
    assert f"{cause.field}: {cause.message}" == want


def test_faults_come_in_the_order_of_fields() -> None:
    schema = _object(b={"type": "integer"}, a={"type": "integer"}) | {"required": ["c"]}
    assert [cause.field for cause in validate({"b": "", "a": ""}, schema)] == ["a", "b", "c"]


@pytest.mark.parametrize("value", [1, "25%", 0.5])
def test_int_or_string_takes_both(value: Any) -> None:
    assert validate({"x": value}, _object(x={"x-kubernetes-int-or-string": True})) == []


def test_rules_of_lists_maps_and_the_root() -> None:
    schema = _object(
        metadata=_object(),
        items={
            "type": "array",
            "items": _object(n={"type": "integer"})
            | {"x-kubernetes-validations": [{"rule": "self.n > 0", "message": "n must be positive"}]},
        },
    ) | {
        "x-kubernetes-validations": [
            {"rule": "size(self.metadata.name) < 3", "messageExpression": "'long: ' + self.metadata.name"}
        ]
    }
    causes = run_rules({"metadata": {"name": "long"}, "items": [{"n": 1}, {"n": 0}]}, None, schema)
    assert [(cause.field, cause.message) for cause in causes] == [
        ("<nil>", "Invalid value: long: long"),
        ("items[1]", "Invalid value: n must be positive"),
    ]  # fmt: skip


def test_transition_rules_need_an_old_value_and_find_items_by_key() -> None:
    rule = {"rule": "self.v == oldSelf.v", "message": "v is fixed"}
    schema = _object(
        items={
            "type": "array",
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["k"],
            "items": _object(k={"type": "string"}, v={"type": "integer"}) | {"x-kubernetes-validations": [rule]},
        }
    )
    old = {"items": [{"k": "a", "v": 1}, {"k": "b", "v": 2}]}
    assert run_rules(old, None, schema) == []
    new = copy.deepcopy(old)
    new["items"] = [{"k": "c", "v": 9}, {"k": "b", "v": 3}, {"k": "a", "v": 1}]
    assert [cause.field for cause in run_rules(new, old, schema)] == ["items[1]"]


def test_a_rule_that_fails_while_it_runs_is_a_fault_of_the_object() -> None:
    rules = {"x-kubernetes-validations": [{"rule": "self.missing > 1", "message": "m"}]}
    [cause] = run_rules({"spec": {}}, None, _object(spec=_object() | rules))
    assert cause.field == "spec"
    assert "missing" in cause.message


def test_one_fault_stands_alone_and_several_in_brackets() -> None:
    [one] = validate({"x": ""}, _object(x={"type": "integer"}))
    assert invalid("K", "g", "n", [one]).message.startswith('K.g "n" is invalid: x: Invalid')
    assert invalid("K", "", "n", [one, one]).message.startswith('K "n" is invalid: x: Invalid')
    two = validate({"x": "", "y": ""}, _object(x={"type": "integer"}, y={"type": "integer"}))
    assert invalid("K", "", "n", two).message.startswith('K "n" is invalid: [x: ')


def test_every_builtin_type_can_be_read() -> None:
    types = builtin_types()
    for name in types.names():
        assert types.schema(name)["properties"]
