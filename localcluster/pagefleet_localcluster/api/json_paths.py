"""The part of kubectl's JSONPath that printer columns use: fields, indices, `[*]`, `[?(@.a=="b")]`."""

import functools
import re
from typing import Any

_STEP = re.compile(
    r"""\.?\[\?\(@\.(?P<key>[\w.\-/]+)\s*==\s*["'](?P<want>[^"']*)["']\)\]"""
    r"""|\.?\[(?P<index>-?\d+|\*)\]|\.?\[["'](?P<quoted>[^"']+)["']\]|\.(?P<field>(?:[^.\[\\]|\\.)+)"""
)
MAX_PATHS = 512


@functools.lru_cache(maxsize=MAX_PATHS)
def parse_path(path: str) -> tuple[tuple[str, str, str], ...]:
    """The steps of a path: (kind, name, wanted value). Raises ValueError for what is not understood."""
    text = path if path.startswith((".", "[")) else f".{path}"
    steps, at = [], 0
    while at < len(text):
        match = _STEP.match(text, at)
        if not match:
            raise ValueError(f"JSON path {path!r} is not understood from {text[at:]!r} on")
        if match["key"]:
            steps.append(("where", match["key"], match["want"]))
        elif match["index"]:
            steps.append(("index", match["index"], ""))
        else:
            name = match["quoted"] or match["field"].replace("\\.", ".")
            steps.append(("field", name, ""))
        at = match.end()
    return tuple(steps)


def find(obj: Any, path: str) -> list[Any]:
    """Every value at the path; empty when there is none."""
    found = [obj]
    for kind, name, want in parse_path(path):
        found = [item for value in found for item in _step(value, kind, name, want)]
    return found


def _step(value: Any, kind: str, name: str, want: str) -> list[Any]:
    if kind == "field":
        return [value[name]] if isinstance(value, dict) and name in value else []
    if not isinstance(value, list):
        return []
    if kind == "where":
        return [item for item in value if isinstance(item, dict) and str(item.get(name)) == want]
    if name == "*":
        return value
    index = int(name)
    return [value[index]] if -len(value) <= index < len(value) else []
