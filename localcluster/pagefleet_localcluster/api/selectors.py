"""Label and field selectors of list, watch and deletecollection, and `LabelSelector` objects."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pagefleet_localcluster.api.errors import bad_request
from pagefleet_localcluster.api.resources import Resource
from pagefleet_localcluster.objects import labels_of, selector_matches

Json = dict[str, Any]
_SET = re.compile(r"^(?P<key>[^\s!=<>,()]+)\s+(?P<op>in|notin)\s*\((?P<values>[^()]*)\)$")
_EQUAL = re.compile(r"^(?P<key>[^\s!=<>,()]+)\s*(?P<op>==|=|!=)\s*(?P<value>[^\s!=<>,()]*)$")
_EXISTS = re.compile(r"^(?P<not>!?)\s*(?P<key>[^\s!=<>,()]+)$")


def parse_label_selector(text: str) -> Json:
    """Reads `a=b,c!=d,e in (f,g),h,!i` as a `LabelSelector` object. Raises ApiError 400 for anything else."""
    return {"matchExpressions": [_parse_requirement(part) for part in _split(text)]}


def _split(text: str) -> list[str]:
    parts = [part.strip() for part in re.split(r",(?![^()]*\))", text)]
    return [] if parts == [""] else parts


def _parse_requirement(part: str) -> Json:
    if match := _SET.match(part):
        values = [value.strip() for value in match["values"].split(",")]
        return {"key": match["key"], "operator": "In" if match["op"] == "in" else "NotIn", "values": values}
    if match := _EQUAL.match(part):
        operator = "NotIn" if match["op"] == "!=" else "In"
        return {"key": match["key"], "operator": operator, "values": [match["value"]]}
    if match := _EXISTS.match(part):
        return {"key": match["key"], "operator": "DoesNotExist" if match["not"] else "Exists"}
    raise bad_request(f"unable to parse requirement: found '{part}', expected: key, key=value, key in (values)")


def format_selector(obj: Mapping[str, Any]) -> str:
    """A `LabelSelector` object as the text that tables and the scale subresource show."""
    parts = [f"{k}={v}" for k, v in sorted((obj.get("matchLabels") or {}).items())]
    for expression in obj.get("matchExpressions") or ():
        op, key, values = expression["operator"], expression["key"], ",".join(sorted(expression.get("values") or ()))
        forms = {"In": f"{key} in ({values})", "NotIn": f"{key} notin ({values})", "Exists": key}
        parts.append(forms.get(op, f"!{key}"))
    return ",".join(parts)


@dataclass(frozen=True)
class FieldSelector:
    """Equalities on single fields: (path, wanted value, whether it must be equal)."""

    terms: tuple[tuple[str, str, bool], ...] = ()

    def matches(self, obj: Mapping[str, Any]) -> bool:
        """Whether every term holds; a missing field counts as empty text."""
        return all((_field(obj, path) == value) is equal for path, value, equal in self.terms)


def parse_field_selector(text: str, resource: Resource) -> FieldSelector:
    """Reads `a.b=c,d!=e`. Raises ApiError 400 for a field that the resource cannot select on."""
    supported = resource.fields | {"metadata.name"} | ({"metadata.namespace"} if resource.namespaced else set())
    terms = []
    for part in _split(text):
        match = _EQUAL.match(part)
        if not match:
            raise bad_request(f"invalid selector: '{part}'; can't understand '{part}'")
        if match["key"] not in supported:
            if not resource.fields and not resource.custom:
                known = 'only "metadata.name", "metadata.namespace"'
                raise bad_request(f'"{match["key"]}" is not a known field selector: {known}')
            raise bad_request(f"field label not supported: {match['key']}")
        terms.append((match["key"], match["value"], match["op"] != "!="))
    return FieldSelector(tuple(terms))


def _field(obj: Mapping[str, Any], path: str) -> str:
    value: Any = obj
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


Predicate = Callable[[Json], bool]


def predicate(labels: Json, fields: FieldSelector) -> Predicate | None:
    """One test for both selectors, or None when everything matches."""
    if not labels["matchExpressions"] and not fields.terms:
        return None
    return lambda obj: selector_matches(labels, labels_of(obj)) and fields.matches(obj)
