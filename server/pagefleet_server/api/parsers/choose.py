"""Which parsers a model needs, told by its chat template."""

from collections.abc import Collection

from pagefleet_server.api.parsers.reasoning import OPEN
from pagefleet_server.api.parsers.tools import HermesParser, JsonParser, MistralParser, ToolParser


def detect_tool_parser(template: str) -> str:
    """`hermes`, `mistral` or `json`, for a template that shows tools to the model."""
    if HermesParser.OPEN in template:
        return "hermes"
    if MistralParser.OPEN in template:
        return "mistral"
    return "json"


def make_tool_parser(kind: str, names: Collection[str]) -> ToolParser:
    """A fresh parser of what detect_tool_parser() gave; `names` are the functions that the request offers."""
    if kind == "hermes":
        return HermesParser()
    return MistralParser() if kind == "mistral" else JsonParser(names)


def detect_reasoning(template: str) -> bool:
    """Whether the template knows of <think>."""
    return OPEN in template
