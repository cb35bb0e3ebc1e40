"""managedFields and server-side apply, as functions."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet_localcluster.api import ownership
from pagefleet_localcluster.api.builtin_types import builtin_types
from pagefleet_localcluster.api.errors import ApiError
from pagefleet_localcluster.api.field_sets import all_fields, from_fields_v1, to_fields_v1

Json = dict[str, Any]
SCHEMA = builtin_types().schema("Deployment")


def _writer(manager: str, operation: str = "Apply", now: str = "2026-01-01T00:00:00Z") -> ownership.Writer:
    return ownership.Writer(
        manager=manager,
        operation=operation,
        subresource="",
        api_version="apps/v1",
        now=now,
        reset=frozenset({"status"}),
    )


def _config(**spec: Any) -> Json:
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": spec}


def _apply(live: Json | None, manager: str, *, force: bool = False, **spec: Any) -> Json:
    return ownership.apply(live, _config(**spec), SCHEMA, _writer(manager), force=force)


def _containers(*containers: Json) -> Json:
    return {"template": {"spec": {"containers": list(containers)}}}


def _owned(obj: Json, manager: str) -> Json:
    found = [e["fieldsV1"] for e in obj["metadata"].get("managedFields") or () if e["manager"] == manager]
    assert len(found) <= 1
    return found[0] if found else {}


def test_a_field_that_is_no_longer_applied_goes() -> None:
    live = _apply(None, "a", replicas=2, paused=True)
    after = _apply(live, "a", replicas=2)
    assert after["spec"] == {"replicas": 2}
    assert _owned(after, "a") == {"f:spec": {"f:replicas": {}}}


def test_a_field_that_someone_else_also_applies_stays() -> None:
    live = _apply(_apply(None, "a", replicas=2, paused=True), "b", paused=True)
    after = _apply(live, "a", replicas=2)
    assert after["spec"] == {"replicas": 2, "paused": True}
    assert _owned(after, "b") == {"f:spec": {"f:paused": {}}}


def test_the_same_value_from_two_managers_is_no_conflict_and_is_shared() -> None:
    after = _apply(_apply(None, "a", replicas=2), "b", replicas=2)
    assert _owned(after, "a") == _owned(after, "b") == {"f:spec": {"f:replicas": {}}}


def test_another_value_is_a_conflict_that_names_manager_and_field() -> None:
    live = _apply(None, "a", replicas=2)
    with pytest.raises(ApiError) as caught:
        _apply(live, "b", replicas=3)
    assert caught.value.code == 409
    assert caught.value.message == 'Apply failed with 1 conflict: conflict with "a": .spec.replicas'


def test_conflicts_with_several_fields_are_listed() -> None:
    live = _apply(None, "a", replicas=2, **_containers({"name": "x", "image": "i:1"}))
    with pytest.raises(ApiError) as caught:
        _apply(live, "b", replicas=3, **_containers({"name": "x", "image": "i:2"}))
    assert caught.value.message == (
        'Apply failed with 2 conflicts: conflicts with "a":\n'
        '- .spec.replicas\n- .spec.template.spec.containers[name="x"].image'
    )


def test_conflicts_with_several_managers_are_grouped() -> None:
    live = _apply(_apply(None, "a", replicas=2), "b", paused=True)
    with pytest.raises(ApiError) as caught:
        _apply(live, "c", replicas=3, paused=False)
    assert caught.value.message == (
        'Apply failed with 2 conflicts: conflicts with "a":\n- .spec.replicas\nconflicts with "b":\n- .spec.paused'
    )


def test_an_update_by_hand_takes_the_field_and_conflicts_with_a_later_apply() -> None:
    live = _apply(None, "a", replicas=2)
    changed = json.loads(json.dumps(live))
    changed["spec"]["replicas"] = 5
    ownership.track_update(live, changed, SCHEMA, _writer("kubectl", "Update"))
    assert _owned(changed, "a") == {}
    with pytest.raises(ApiError, match='conflict with "kubectl" using apps/v1'):
        _apply(changed, "a", replicas=2)


def test_force_takes_the_field_away_from_the_other_manager() -> None:
    after = _apply(_apply(None, "a", replicas=2, paused=True), "b", force=True, replicas=3)
    assert after["spec"] == {"replicas": 3, "paused": True}
    assert _owned(after, "a") == {"f:spec": {"f:paused": {}}}


def test_items_of_keyed_lists_have_their_own_owners() -> None:
    live = _apply(None, "a", **_containers({"name": "x", "image": "i:1"}))
    live = _apply(live, "b", **_containers({"name": "y", "image": "j:1"}))
    assert [c["name"] for c in live["spec"]["template"]["spec"]["containers"]] == ["x", "y"]
    after = _apply(live, "a", **_containers())
    assert [c["name"] for c in after["spec"]["template"]["spec"]["containers"]] == ["y"]


def test_an_item_with_fields_of_another_keeps_those_fields() -> None:
    live = _apply(None, "a", **_containers({"name": "x", "image": "i:1", "workingDir": "/w"}))
    live = _apply(live, "b", **_containers({"name": "x", "tty": True}))
    after = _apply(live, "a", **_containers())
    assert after["spec"]["template"]["spec"]["containers"] == [{"name": "x", "tty": True}]


def test_ports_are_keyed_by_number_and_the_default_protocol() -> None:
    ports = [{"containerPort": 80}, {"containerPort": 80, "protocol": "UDP"}]
    live = _apply(None, "a", **_containers({"name": "x", "ports": ports}))
    fields = _owned(live, "a")["f:spec"]["f:template"]["f:spec"]["f:containers"]['k:{"name":"x"}']["f:ports"]
    assert set(fields) == {'k:{"containerPort":80,"protocol":"TCP"}', 'k:{"containerPort":80,"protocol":"UDP"}'}


def test_atomic_values_are_owned_and_replaced_as_a_whole() -> None:
    live = _apply(None, "a", selector={"matchLabels": {"x": "1", "y": "2"}})
    assert _owned(live, "a") == {"f:spec": {"f:selector": {}}}
    assert _apply(live, "a", selector={"matchLabels": {"x": "1"}})["spec"]["selector"] == {"matchLabels": {"x": "1"}}


def test_removing_the_last_field_removes_the_container_that_it_emptied() -> None:
    live = _apply(None, "a", template={"metadata": {"labels": {"x": "1"}}})
    assert _apply(live, "a")["spec"] in ({}, {"template": {}}, {"template": {"metadata": {}}})


def test_applying_the_same_again_changes_nothing_not_even_the_time() -> None:
    live = _apply(None, "a", replicas=2, **_containers({"name": "x", "image": "i:1"}))
    config = _config(replicas=2, **_containers({"name": "x", "image": "i:1"}))
    again = ownership.apply(live, config, SCHEMA, _writer("a", now="2027-01-01T00:00:00Z"), force=False)
    assert again == live
    assert ownership.same_but_managers(again, live)


def test_status_and_names_belong_to_nobody() -> None:
    config = _config(replicas=1) | {"status": {"replicas": 3}}
    live = ownership.apply(None, config, SCHEMA, _writer("a"), force=False)
    assert "status" not in live
    assert _owned(live, "a") == {"f:spec": {"f:replicas": {}}}


PATHS = st.sets(
    st.lists(st.sampled_from(["f:a", "f:b", 'k:{"name":"x"}', 'v:"y"']), min_size=1, max_size=4).map(tuple), max_size=12
)


@given(PATHS)
def test_field_sets_survive_their_written_form(paths: set[tuple[str, ...]]) -> None:
    assert from_fields_v1(json.loads(json.dumps(to_fields_v1(paths)))) == paths


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "replicas": st.integers(0, 3),
        "paused": st.booleans(),
        "template": st.fixed_dictionaries(
            {},
            optional={
                "metadata": st.fixed_dictionaries(
                    {"labels": st.dictionaries(st.sampled_from("xyz"), st.sampled_from("12"), min_size=1)}
                ),
                "spec": st.fixed_dictionaries(
                    {
                        "containers": st.lists(
                            st.fixed_dictionaries(
                                {"name": st.sampled_from("pqr")}, optional={"image": st.sampled_from(["i", "j"])}
                            ),
                            unique_by=lambda item: item["name"],
                            min_size=1,
                        )
                    }
                ),
            },
        ),
    },
)


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), VALUES), min_size=1, max_size=6))
def test_forced_applies_always_show_the_last_config_and_own_only_what_is_there(steps: list[tuple[str, Json]]) -> None:
    """Whatever went before: an applied config is in the object, and every owned field exists."""
    live: Json | None = None
    for manager, spec in steps:
        live = _apply(live, manager, force=True, **spec)
        assert ownership.merge(live, _config(**spec), SCHEMA)["spec"] == live["spec"] if "spec" in live else not spec
        present = set(all_fields(live, SCHEMA)) | {()}
        for entry in live["metadata"].get("managedFields") or ():
            for path in from_fields_v1(entry["fieldsV1"]):
                assert path in present, (path, live)
