"""Label and field selectors."""

from dataclasses import replace
from typing import Any

import pytest

from pagefleet_localcluster.api.errors import ApiError
from pagefleet_localcluster.api.resources import Resource, builtin_resources
from pagefleet_localcluster.api.selectors import (
    format_selector,
    parse_field_selector,
    parse_label_selector,
)
from pagefleet_localcluster.objects import selector_matches


def resource(plural: str, **changes: Any) -> Resource:
    return replace(next(r for r in builtin_resources() if r.plural == plural), **changes)


@pytest.mark.parametrize(
    ("text", "labels", "want"),
    [
        ("", {}, True),
        ("a=1", {"a": "1"}, True),
        ("a==1", {"a": "2"}, False),
        ("a=1", {}, False),
        ("a!=1", {}, True),
        ("a!=1", {"a": "1"}, False),
        ("a", {"a": ""}, True),
        ("!a", {"a": ""}, False),
        ("!a", {}, True),
        ("a in (1, 2)", {"a": "2"}, True),
        ("a notin (1,2)", {"a": "2"}, False),
        ("a notin (1,2)", {}, True),
        ("a in (1,2),b=3", {"a": "1", "b": "3"}, True),
        ("a in (1,2),b=3", {"a": "1", "b": "4"}, False),
        ("app.kubernetes.io/name=x", {"app.kubernetes.io/name": "x"}, True),
        ("a=", {"a": ""}, True),
    ],
)
def test_label_selector(text: str, labels: dict[str, str], want: bool) -> None:
    assert selector_matches(parse_label_selector(text), labels) is want


@pytest.mark.parametrize("text", ["a=b=c", "a in 1,2", "a in (1", "=1", "a b", "(a)"])
def test_label_selector_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_label_selector(text)
    assert caught.value.code == 400


@pytest.mark.parametrize(
    ("expression", "labels", "want"),
    [
        ({"key": "a", "operator": "In", "values": ["1"]}, {"a": "1"}, True),
        ({"key": "a", "operator": "NotIn", "values": ["1"]}, {"a": "1"}, False),
        ({"key": "a", "operator": "Exists"}, {"a": "1"}, True),
        ({"key": "a", "operator": "DoesNotExist"}, {"a": "1"}, False),
    ],
)
def test_selector_objects(expression: dict[str, Any], labels: dict[str, str], want: bool) -> None:
    selector = {"matchLabels": {"b": "2"}, "matchExpressions": [expression]}
    assert selector_matches(selector, labels | {"b": "2"}) is want


def test_selector_text_is_sorted_and_reads_back() -> None:
    selector = {
        "matchLabels": {"b": "2", "a": "1"},
        "matchExpressions": [
            {"key": "c", "operator": "In", "values": ["y", "x"]},
            {"key": "d", "operator": "DoesNotExist"},
            {"key": "e", "operator": "Exists"},
        ],
    }
    text = format_selector(selector)
    assert text == "a=1,b=2,c in (x,y),!d,e"
    assert selector_matches(parse_label_selector(text), {"a": "1", "b": "2", "c": "x", "e": ""})


def test_field_selector() -> None:
    supported = resource("pods", fields=frozenset({"spec.nodeName", "spec.unschedulable"}))
    pod = {"metadata": {"name": "p"}, "spec": {"nodeName": "n", "unschedulable": True}}
    assert parse_field_selector("spec.nodeName=n,metadata.name!=q", supported).matches(pod)
    assert parse_field_selector("spec.unschedulable=true", supported).matches(pod)
    assert not parse_field_selector("spec.nodeName=", supported).matches(pod)
    assert parse_field_selector("spec.nodeName=", supported).matches({"metadata": {}, "spec": {}})


@pytest.mark.parametrize("text", ["spec.replicas=1", "nonsense", "a=b=c"])
def test_field_selector_refuses_what_it_cannot_select(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_field_selector(text, resource("configmaps"))
    assert caught.value.code == 400
