"""Specs are parsed when they change, and never taken for another one."""

import copy

import pytest

from pagefleet_operator.errors import SpecError
from pagefleet_operator.names import ObjectKey
from pagefleet_operator.parsing import parse
from pagefleet_operator.specs import Specs
from support.operator_objects import llmd_body


def test_another_status_needs_no_other_spec() -> None:
    specs = Specs()
    first = specs.parse(llmd_body())
    later = llmd_body(status={"phase": "Available"}, generation=7)
    second = specs.parse(later)
    assert second.spec is first.spec
    assert second == parse(later)


@pytest.mark.parametrize(
    "spec",
    [{"replicas": 2}, {"engine": {"args": ["--x"]}}, {"template": {"metadata": {"labels": {"a": "b"}}}}],
)
def test_any_edit_is_seen_even_without_a_new_generation(spec: dict[str, object]) -> None:
    specs = Specs()
    before = specs.parse(llmd_body())
    edited = llmd_body(spec=spec)
    assert specs.parse(edited) == parse(edited)
    assert specs.parse(edited).spec != before.spec
    assert specs.parse(copy.deepcopy(llmd_body())) == parse(llmd_body())


def test_names_do_not_share_their_specs() -> None:
    """The served name is the object's where the spec gives none."""
    specs = Specs()
    assert specs.parse(llmd_body("a")).spec.served_name == "a"
    assert specs.parse(llmd_body("b")).spec.served_name == "b"


def test_an_invalid_spec_is_refused_each_time_and_forgets_nothing_else() -> None:
    specs = Specs()
    specs.parse(llmd_body())
    for _ in range(2):
        with pytest.raises(SpecError):
            specs.parse(llmd_body(spec={"replicas": -1}))
    assert specs.parse(llmd_body()).spec.replicas == 1


def test_what_is_gone_is_forgotten() -> None:
    specs = Specs()
    specs.parse(llmd_body())
    specs.forget(ObjectKey("default", "chat"))
    specs.forget(ObjectKey("default", "never-seen"))
    assert specs._known == {}
