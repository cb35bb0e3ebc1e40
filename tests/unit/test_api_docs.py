"""/openapi.json and docs/api.md say what the code does."""

import json
import re
from pathlib import Path
from typing import Any

from pagefleet_server.api.app import make_page_routes, make_routes
from pagefleet_server.api.openapi import make_openapi
from pagefleet_server.api.protocol.chat import ChatBody
from pagefleet_server.api.protocol.completions import CompletionBody
from pagefleet_server.api.protocol.embeddings import EmbeddingBody
from pagefleet_server.api.protocol.fields import HARMLESS, REFUSED
from pagefleet_server.api.protocol.sampling import SamplingBody

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", DOCS, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def rows(title: str) -> set[str]:
    """Names of a table's first column."""
    lines = re.findall(r"^\| (`[^|]*`) \|", section(title), re.MULTILINE)
    return {name for line in lines for name in re.findall(r"`([^`]+)`", line)}


def test_every_reference_of_the_document_leads_somewhere() -> None:
    document = make_openapi(version="1", root_path="/llm")
    assert document["servers"] == [{"url": "/llm"}]
    schemas = document["components"]["schemas"]
    references = re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document))
    assert set(references) <= set(schemas) and "CompletionBody" in references
    properties: dict[str, Any] = schemas["ChatBody"]["properties"]
    assert set(properties) == set(ChatBody.model_fields)


def test_the_document_has_every_public_path() -> None:
    served = {route.path for route in make_routes("")} - {
        "/openapi.json",
        "/drain",
        "/reset_prefix_cache",
        "/v1/models/{model:.+}",
    }
    assert set(make_openapi(version="1", root_path="")["paths"]) == served


def test_the_docs_name_every_route() -> None:
    for route in [*make_routes(""), *make_page_routes("")]:
        path = route.path.replace("{model:.+}", "NAME").replace("{file}", "FILE")
        assert f"`{route.method} {path}`" in section("Routes"), path


def test_the_docs_name_every_supported_field() -> None:
    both = set(SamplingBody.model_fields)
    assert rows("Fields of both generation routes") == both
    assert rows("Fields of /v1/completions") == set(CompletionBody.model_fields) - both
    assert rows("Fields of /v1/chat/completions") == set(ChatBody.model_fields) - both
    assert rows("Fields of /v1/embeddings") == set(EmbeddingBody.model_fields)


def test_the_docs_name_every_refused_and_every_harmless_field() -> None:
    text = section("Fields that are refused")
    refused, _, harmless = text.partition("change nothing")
    assert set(re.findall(r"`([a-z_]+)`", refused)) >= set(REFUSED)
    assert set(re.findall(r"`([a-z_]+)`", harmless)) == set(HARMLESS)
