"""What a CRD must fulfil before it is accepted; the recordings hold a real server's words for more."""

from typing import Any

import pytest

from pagefleet_localcluster.api.crd_rules import check_schema
from pagefleet_localcluster.api.crd_shape import check_shape

TEXT = {"type": "string", "maxLength": 64}


def _rule(text: str, **more: Any) -> dict[str, Any]:
    return {"x-kubernetes-validations": [{"rule": text, "message": "m"} | more]}


@pytest.mark.parametrize(
    ("schema", "field", "text"),
    [
        ({"type": "text"}, "s.type", "must be one of array, boolean"),
        ({"properties": []}, "s.properties", "must be an object"),
        ({"properties": {"a": 7}}, "s.properties[a]", "must be a schema"),
        ({"items": [{"type": "string"}]}, "s.items", "must be a schema"),
        ({"additionalProperties": {"type": 1}}, "s.additionalProperties.type", "must be one of"),
        ({"maxLength": -1}, "s.maxLength", "at least 0"),
        ({"minimum": "1"}, "s.minimum", "must be a number"),
        ({"pattern": "("}, "s.pattern", "a regular expression"),
        ({"required": "a"}, "s.required", "a list of strings"),
        ({"nullable": "yes"}, "s.nullable", "true or false"),
        ({"anyOf": [{}, None]}, "s.anyOf[1]", "must be a schema"),
        ({"x-kubernetes-validations": [{}]}, "s.x-kubernetes-validations[0].rule", "rule is not specified"),
        ({"x-kubernetes-list-type": "map"}, "s.x-kubernetes-list-map-keys", "must not be empty"),
    ],
)
def test_what_is_no_schema_is_named(schema: dict[str, Any], field: str, text: str) -> None:
    [cause] = check_shape(schema, "s")
    assert cause.field == field
    assert text in cause.message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": TEXT | _rule("self.startsWith('x')")}},
        {"type": "array", "maxItems": 10, "items": TEXT} | _rule("self.all(item, item.matches('^[a-z]+$'))"),
        {"type": "object", "additionalProperties": TEXT, "maxProperties": 8} | _rule("size(self) < 5 && has(self.any)"),
        {"type": "object", "properties": {"a": {"type": "integer"}}} | _rule("!has(self.a) || self.a > oldSelf.a"),
        {"type": "object", "properties": {"a": {"type": "integer", "default": 1}}, "default": {}},
    ],
)
def test_good_schemas_are_accepted(schema: dict[str, Any]) -> None:
    assert list(check_shape(schema, "s")) == []
    assert check_schema(schema, "s") == []


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (TEXT | _rule("self ==="), "compilation failed"),
        ({"type": "object", "properties": {"a": TEXT}} | _rule("self.b == ''"), "undefined field 'b'"),
        ({"type": "object", "properties": {"a": TEXT}} | _rule("self.a.b == ''"), "undefined field 'b'"),
        (
            {"type": "array", "maxItems": 1000, "items": {"type": "string"}} | _rule("self.all(x, x.matches('^a+$'))"),
            "estimated rule cost",
        ),
        (
            {
                "type": "array",
                "items": {"type": "object", "properties": {"a": {"type": "string"} | _rule("size(self) < 9")}},
            },
            "exceeds budget",
        ),
        ({"type": "string", "default": 7}, "must be of type string"),
    ],
)
def test_bad_rules_and_defaults_are_refused(schema: dict[str, Any], text: str) -> None:
    causes = check_schema({"type": "object", "properties": {"x": schema}}, "s")
    assert causes
    assert text in causes[0].message
    assert causes[0].field.startswith("s.properties[x]")
