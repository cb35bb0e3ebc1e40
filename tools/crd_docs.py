"""Writes docs/crd.md from crds/llmdeployment.yaml; with --check says whether it is up to date (exit 1 when not)."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
CRD = ROOT / "crds" / "llmdeployment.yaml"
PAGE = ROOT / "docs" / "crd.md"

HEAD = """# LLMDeployment: every field

Generated from `crds/llmdeployment.yaml` by `tools/crd_docs.py`; `kubectl explain llmd.spec --recursive` shows the same.
API `pagefleet.dev/v1alpha1`, short name `llmd`, category `pagefleet`. The smallest object:

```yaml
apiVersion: pagefleet.dev/v1alpha1
kind: LLMDeployment
metadata:
  name: chat
spec:
  model:
    source: file:///models/chat.gguf
```
"""


def main() -> None:
    """Write it, or with --check say whether it is what this script makes (exit code 1 if not)."""
    parser = argparse.ArgumentParser(description="Writes docs/crd.md from crds/llmdeployment.yaml.")
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    page = render(yaml.safe_load(CRD.read_text()))
    if check:
        if not PAGE.is_file() or PAGE.read_text() != page:
            sys.exit("docs/crd.md is not what crds/llmdeployment.yaml says: run tools/crd_docs.py")
        return
    PAGE.write_text(page)


def render(crd: dict[str, Any]) -> str:
    """The whole page."""
    version = crd["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    parts = [HEAD, "## Rules\n", "The API server refuses an object that breaks one, with this message:\n"]
    parts += [f"- `{path}`: {message}" for path, message in rules(schema, "")]
    parts += ["\n## Spec\n", table(schema["properties"]["spec"], "spec")]
    parts += ["\n## Status\n", table(schema["properties"]["status"], "status")]
    parts += ["\n## Columns\n", "| Column | From | Shown | Meaning |", "| --- | --- | --- | --- |"]
    for column in version["additionalPrinterColumns"]:
        shown = "`-o wide`" if column.get("priority") else "always"
        parts.append(
            f"| {column['name'].upper()} | `{column['jsonPath']}` | {shown} | {column.get('description', '')} |"
        )
    return "\n".join(parts) + "\n"


def rules(schema: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """(path, message) of every validation rule."""
    for rule in schema.get("x-kubernetes-validations", []):
        yield path.removeprefix(".") or "object", rule["message"]
    for name, child in schema.get("properties", {}).items():
        yield from rules(child, f"{path}.{name}")
    if "items" in schema:
        yield from rules(schema["items"], f"{path}[]")


def table(schema: dict[str, Any], path: str) -> str:
    """One row per field."""
    rows = ["| Field | Type | Default | Allowed | Meaning |", "| --- | --- | --- | --- | --- |"]
    rows += [
        f"| `{name}`{' (required)' if required else ''} | {kind(field)} | {default(field)} | {allowed(field)} "
        f"| {field.get('description', '')} |"
        for name, field, required in fields(schema, path)
    ]
    return "\n".join(rows)


def fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """(path, schema, required) of every field below."""
    for name, child in schema.get("properties", {}).items():
        yield f"{path}.{name}", child, name in schema.get("required", [])
        yield from fields(child, f"{path}.{name}")
        if isinstance(child.get("items"), dict):
            yield from fields(child["items"], f"{path}.{name}[]")


def kind(schema: dict[str, Any]) -> str:
    """Type in words."""
    if schema.get("type") == "array":
        return f"list of {kind(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), dict):
        return "map of quantities"
    return str(schema.get("type", "quantity"))


def default(schema: dict[str, Any]) -> str:
    """Default as YAML on one line."""
    value = schema.get("default")
    if value is None or value == {}:
        return ""
    return f"`{yaml.safe_dump(value, default_flow_style=True, width=1000).splitlines()[0]}`"


def allowed(schema: dict[str, Any]) -> str:
    """Bounds, values or pattern."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "minimum" in schema:
        return f"{schema['minimum']}..{schema['maximum']}"
    if "maxItems" in schema:
        return f"at most {schema['maxItems']} items"
    if "maxProperties" in schema:
        return f"at most {schema['maxProperties']} entries"
    pattern = schema.get("pattern")
    if pattern is not None:
        escaped = pattern.replace("|", "\\|")
        return f"`{escaped}`, at most {schema['maxLength']} characters"
    return f"at most {schema['maxLength']} characters" if "maxLength" in schema else ""


if __name__ == "__main__":
    main()
