"""A model's own Jinja template, rendered as transformers renders it, in a sandbox."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagefleet_server.api.errors import BadRequestError


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's part for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's body, as if the tags were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Environment(ImmutableSandboxedEnvironment):
    """Lets errors through as they are: Jinja's own way of showing the template in a traceback leaves a circle of frames
    that would hold every message of the request."""

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Called where an error is being handled."""
        raise


class ChatTemplate:
    """One compiled template. Raises BadRequestError on construction when the source itself is broken."""

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
            """Whether it shows tools to the model."""
        except TemplateError as error:
            line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise BadRequestError(f"the chat template cannot be used: {error.message}{line}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises BadRequestError with the template's own message."""
        try:
            text = self._template.render(
                **{
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools,
                    "documents": documents,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except RecursionError as error:
            raise BadRequestError("the request is nested too deeply for the chat template", param="messages") from error
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            # besides its own errors, Jinja lets those of the expressions in the template through
            raise BadRequestError(f"chat template: {error}", param="messages") from error
        return _cut_after_final(text, messages[-1]) if continue_final_message else text


def _cut_after_final(text: str, message: Mapping[str, Any]) -> str:
    """Drop what the template writes after the last message, so that the model goes on with it."""
    content = str(message["content"])
    start = text.rfind(content.strip())
    if not content.strip() or start < 0:
        raise BadRequestError(
            "continue_final_message: the last message is empty, or the chat template changes its text",
            param="continue_final_message",
        )
    whole = content.lstrip()
    return text[: start + len(whole if text.startswith(whole, start) else content.strip())]


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML characters, which prompts must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
