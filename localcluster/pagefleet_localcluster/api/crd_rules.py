"""What a CRD's schema must fulfil before it is accepted: its defaults are valid, its rules compile and are cheap.

Field names are checked for chains from `self` and `oldSelf`; variables of macros are not followed."""

import json
import re
from collections.abc import Iterator
from typing import Any

from pagefleet_localcluster.api import cel_cost
from pagefleet_localcluster.api.cel_rules import RuleError, compile_rule, run_rules
from pagefleet_localcluster.api.errors import Cause
from pagefleet_localcluster.api.validation import validate

Schema = dict[str, Any]
Json = dict[str, Any]
_CHAIN = re.compile(r"(?<![\w.])(?P<has>has\()?(?:self|oldSelf)(?P<fields>(?:\.[A-Za-z_]\w*)+)(?P<call>\()?")
_ROOT_METADATA: Schema = {"type": "object", "properties": {"name": {}, "generateName": {}}}
_ADVICE = (
    "(try simplifying the rule, or adding maxItems, maxProperties, and maxLength where arrays, maps, and strings "
    "are declared)"
)


def check_schema(schema: Schema, path: str) -> list[Cause]:
    """Every reason to refuse a schema that stands at `path` of a CRD."""
    causes: list[Cause] = []
    total = 0.0
    contributors: list[str] = []
    for where, node, cardinality in _walk(schema, path, 1.0):
        if "default" in node:
            causes += _check_default(node, where)
        root = where == path
        for index, rule in enumerate(node.get("x-kubernetes-validations") or ()):
            at = f"{where}.x-kubernetes-validations[{index}]"
            fault = _compile_fault(rule, _visible(node) if root else node)
            if fault:
                causes.append(Cause(field=f"{at}.rule", message=f"Invalid value: {_shown_rule(rule)}: {fault}"))
                continue
            for kind in ("rule", "messageExpression"):
                if not rule.get(kind):
                    continue
                cost = cel_cost.estimate(rule[kind], node) * cardinality
                total += cost
                if cost > cel_cost.RULE_BUDGET:
                    contributors.append(f"{at}.{kind}")
                    causes.append(_over(f"{at}.{kind}", f"estimated {kind} cost", cost / cel_cost.RULE_BUDGET))
    if total > cel_cost.TOTAL_BUDGET:
        text = "Forbidden: contributed to estimated rule cost total exceeding cost limit for entire OpenAPIv3 schema"
        causes += [Cause(field=at, message=text, reason="FieldValueForbidden") for at in contributors]
        what = "x-kubernetes-validations estimated rule cost total for entire OpenAPIv3 schema"
        causes.append(_over(path, what, total / cel_cost.TOTAL_BUDGET))
    return causes


def _over(field: str, what: str, factor: float) -> Cause:
    by = "factor of more than 100x" if factor > 100 else f"a factor of {factor:.1f}x"
    text = f"Forbidden: {what} exceeds budget by {by} {_ADVICE}"
    return Cause(field=field, message=text, reason="FieldValueForbidden")


def _walk(schema: Schema, path: str, cardinality: float) -> Iterator[tuple[str, Schema, float]]:
    """(path, schema, how often an object can hold it)."""
    yield path, schema, cardinality
    for name, child in sorted((schema.get("properties") or {}).items()):
        yield from _walk(child, f"{path}.properties[{name}]", cardinality)
    if isinstance(schema.get("items"), dict):
        yield from _walk(schema["items"], f"{path}.items", cardinality * cel_cost.max_items(schema))
    if isinstance(schema.get("additionalProperties"), dict):
        below = schema["additionalProperties"]
        yield from _walk(below, f"{path}.additionalProperties", cardinality * cel_cost.max_items(schema))


def _visible(root: Schema) -> Schema:
    text = {"type": "string"}
    fixed = {"apiVersion": text, "kind": text, "metadata": _ROOT_METADATA}
    return {**root, "properties": {**(root.get("properties") or {}), **fixed}}


def _check_default(node: Schema, where: str) -> list[Cause]:
    """A default must be valid as it stands, before defaults below it fill it."""
    value = node["default"]
    faults = validate(value, node)
    if not faults:
        wrapped = run_rules({"x": value}, None, {"properties": {"x": node}})
        faults = [Cause(field=fault.field[1:], message=fault.message, reason=fault.reason) for fault in wrapped]
    found = []
    for fault in faults:
        inner = fault.field if not fault.field or fault.field.startswith((".", "[")) else f".{fault.field}"
        found.append(Cause(field=f"{where}.default{inner}", message=fault.message, reason=fault.reason))
    return found


def _compile_fault(rule: Json, schema: Schema) -> str | None:
    text = rule["rule"]
    try:
        compile_rule(text)
    except RuleError as error:
        return f"compilation failed: {error}"
    for match in _CHAIN.finditer(text):
        fields = match["fields"].split(".")[1:]
        if match["call"]:
            fields.pop()  # a method
        at = match.start("fields")
        node: Schema | None = schema
        for position, name in enumerate(fields):
            if node is None or not isinstance(node, dict):
                break
            if isinstance(node.get("additionalProperties"), dict):
                node = node["additionalProperties"]
            elif name in (node.get("properties") or {}):
                node = node["properties"][name]
            else:
                last = position == len(fields) - 1
                column = match.start() + len("has") if match["has"] and last else at
                line = f"\n | {text}\n | {'.' * column}^"
                return f"compilation failed: ERROR: <input>:1:{column + 1}: undefined field '{name}'{line}"
            at += len(name) + 1
    return None


def _shown_rule(rule: Json) -> str:
    """The rule as Go prints it."""
    shown = {
        "Rule": rule["rule"],
        "Message": rule.get("message", ""),
        "MessageExpression": rule.get("messageExpression", ""),
        "Reason": rule.get("reason"),
        "FieldPath": rule.get("fieldPath", ""),
        "OptionalOldSelf": rule.get("optionalOldSelf"),
    }
    text = json.dumps(shown, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
