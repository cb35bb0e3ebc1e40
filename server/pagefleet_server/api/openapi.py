"""The OpenAPI document, made from the pydantic models of the bodies."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pagefleet_server.api.protocol.chat import ChatBody
from pagefleet_server.api.protocol.completions import CompletionBody
from pagefleet_server.api.protocol.embeddings import EmbeddingBody
from pagefleet_server.api.protocol.tokenizing import DetokenizeBody, TokenizeBody

POSTS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionBody, "Continue each prompt"),
    "/v1/chat/completions": (ChatBody, "Answer a conversation"),
    "/v1/embeddings": (EmbeddingBody, "A vector for each text"),
    "/tokenize": (TokenizeBody, "Token ids of a text or a conversation"),
    "/detokenize": (DetokenizeBody, "Text of token ids"),
}
GETS = {
    "/v1/models": "The served model",
    "/tokenizer_info": "Special tokens and chat template",
    "/version": "Version of the server, and its kernels",
    "/health": "200 when the model is loaded and the engine works",
    "/livez": "503 when the engine is dead or hangs",
    "/readyz": "200 when new requests are welcome",
    "/startupz": "200 once a warm-up has run",
    "/metrics": "Prometheus text",
}
STREAMING = frozenset({"/v1/completions", "/v1/chat/completions"})
TEXT = frozenset({"/metrics"})
POST_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503)
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def make_openapi(*, version: str, root_path: str) -> dict[str, Any]:
    """The whole document."""
    template = "#/components/schemas/{model}"
    inputs = [(model, "validation") for model, _ in POSTS.values()]
    _, definitions = models_json_schema(inputs, ref_template=template)  # type: ignore[arg-type]  # mode is a Literal
    paths = {path: {"get": _get(path, summary)} for path, summary in GETS.items()}
    paths |= {path: {"post": _post(path, model, summary)} for path, (model, summary) in POSTS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "PageFleet server", "version": version},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": {**definitions["$defs"], "Error": ERROR_SCHEMA},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _get(path: str, summary: str) -> dict[str, Any]:
    kind = "text/plain" if path in TEXT else "application/json"
    responses = {"200": {"description": "OK", "content": {kind: {"schema": {}}}}}
    if path not in TEXT:
        responses["503"] = {"description": "Not now", "content": {"application/json": {"schema": {"type": "object"}}}}
    return {"summary": summary, "responses": responses | _errors(401)}


def _post(path: str, model: type[BaseModel], summary: str) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path in STREAMING:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    errors = (*POST_ERRORS, 504) if path in STREAMING else POST_ERRORS
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": body},
        "responses": {"200": {"description": "OK", "content": content}} | _errors(*errors),
    }


def _errors(*codes: int) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {str(code): {"description": "Error", "content": content} for code in codes}
