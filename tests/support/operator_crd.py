"""The CRD as it is shipped, and what an API server would say of an object."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pagefleet_localcluster.api.cel_rules import run_rules
from pagefleet_localcluster.api.schema import apply_defaults, prune
from pagefleet_localcluster.api.validation import validate
from pagefleet_operator import names

CRD = yaml.safe_load((Path(__file__).resolve().parents[2] / "crds" / "llmdeployment.yaml").read_text())
VERSION = CRD["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
SPEC = SCHEMA["properties"]["spec"]
STATUS = SCHEMA["properties"]["status"]


def walk(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}")
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from walk(schema["additionalProperties"], f"{path}{{}}")


def at(path: str) -> dict[str, Any]:
    return dict(walk(SPEC, "spec"))[path]


def admit(body: dict[str, Any]) -> list[str]:
    """What the API server would say: defaults, then schema, then rules. Changes `body`."""
    metadata = body.pop("metadata")  # has its own schema in the API server
    unknown = prune(body, SCHEMA)
    body["metadata"] = metadata
    apply_defaults(body, SCHEMA)
    causes = validate(body, SCHEMA) or run_rules(body, None, SCHEMA)
    return [*unknown, *(f"{cause.field}: {cause.message}" for cause in causes)]


def body(spec: Any, name: str = "chat") -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "uid": "u", "generation": 1}
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "spec": spec}


MODEL = {"source": "file:///models/tiny"}
