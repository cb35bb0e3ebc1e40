"""Body of POST /v1/chat/completions, and messages as templates read them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag, model_validator
from pydantic_core import from_json

from pagefleet_server.api.errors import BadRequestError
from pagefleet_server.api.json_values import check_strings, check_values
from pagefleet_server.api.logprobs import MAX_TOP_LOGPROBS
from pagefleet_server.api.protocol.sampling import Flag, SamplingBody
from pagefleet_server.api.protocol.tools import MAX_TOOLS, Function, Tool

MAX_MESSAGES = 4096


class ContentPart(BaseModel):
    """A part of a message's content; only text is served."""

    model_config = ConfigDict(extra="ignore")
    type: str
    text: str | None = None


def _content_shape(value: Any) -> str | None:
    return "one-text" if isinstance(value, str) else "many-parts" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("one-text")] | Annotated[list[ContentPart], Field(fail_fast=True), Tag("many-parts")],
    Discriminator(
        _content_shape,
        custom_error_type="content_shape",
        custom_error_message="must be a text or a list of parts",
    ),
]


class Message(BaseModel):
    """One message of the conversation."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, JsonValue]], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def to_template(self, index: int) -> dict[str, Any]:
        """The dict that chat templates expect: content as one text, tool call arguments as objects."""
        shown: dict[str, Any] = {"role": self.role, "content": self._text(index)}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                shown[name] = value
        if self.tool_calls:
            shown["tool_calls"] = [_with_parsed_arguments(call, index) for call in self.tool_calls]
        return shown

    def _text(self, index: int) -> str:
        if self.content is None:
            if self.role == "assistant":
                return ""
            raise BadRequestError("content is missing", param=f"messages[{index}].content")
        if isinstance(self.content, str):
            return self.content
        for number, part in enumerate(self.content):
            if part.type != "text" or part.text is None:
                raise BadRequestError(
                    f"content part of type {part.type[:40]!r} is not supported; this model reads only text parts",
                    param=f"messages[{index}].content[{number}]",
                )
        return "\n".join(part.text for part in self.content if part.text is not None)


def to_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation as chat templates expect it. Raises BadRequestError for content that is not text, and for
    arguments of tool calls that have, all together, more values than a body may."""
    calls = [call for message in messages for call in message.tool_calls or ()]
    texts = [_arguments_text(call) or "" for call in calls]
    written = ",".join(texts).encode(errors="replace")
    check_strings(written)
    check_values(written)
    return [message.to_template(index) for index, message in enumerate(messages)]


def _arguments_text(call: Mapping[str, Any]) -> str | None:
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return arguments if isinstance(arguments, str) else None


def _with_parsed_arguments(call: dict[str, Any], index: int) -> dict[str, Any]:
    text = _arguments_text(call)
    if text is None:
        return call
    try:
        # The parser of bodies: bounded in depth and digits, and nothing in it that has no UTF-8.
        arguments = from_json(text or "{}")
    except ValueError as error:
        raise BadRequestError(
            f"arguments of a tool call are no JSON: {error}", param=f"messages[{index}].tool_calls"
        ) from error
    return {**call, "function": {**call["function"], "arguments": arguments}}


class ChatBody(SamplingBody):
    """The conversation, rendered by the model's own template."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """Wins over max_tokens. Neither: the rest of the context."""
    logprobs: Flag = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    """So many of the likeliest tokens beside each drawn one; needs logprobs: true."""
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    """The output continues the last message; needs add_generation_prompt: false."""
    add_special_tokens: Flag = False
    """Templates write special tokens themselves."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: JsonValue = "auto"
    """auto, none, required, or one function."""
    parallel_tool_calls: Flag = True
    """False: only the first call is given."""
    include_reasoning: Flag = True
    """False: reasoning is left out of the answer."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    documents: Annotated[list[dict[str, JsonValue]], Field(fail_fast=True)] | None = None
    reasoning_effort: str | None = None
    """Given to the template."""

    @model_validator(mode="after")
    def _check_together(self) -> "ChatBody":
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message needs add_generation_prompt: false")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self

    @model_validator(mode="after")
    def _check_tool_choice(self) -> "ChatBody":
        names = [tool.function.name for tool in self.tools]
        match self.tool_choice:
            case "auto" | "none":
                return self
            case "required" if names:
                return self
            case {"type": "function", "function": {"name": name}} if name in names:
                return self
        raise ValueError(
            'tool_choice must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}, '
            "the last two with tools that it can choose from"
        )

    @property
    def offers_tools(self) -> bool:
        """Whether the model may call something."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forced(self) -> list[Function]:
        """Functions of which the model must call one; empty when it may choose."""
        functions = [tool.function for tool in self.tools]
        match self.tool_choice:
            case "required":
                return functions
            case {"function": {"name": name}}:
                return [function for function in functions if function.name == name]
        return []

    @property
    def num_logprobs(self) -> int | None:
        """As `logprobs` and `top_logprobs` say."""
        return self.top_logprobs if self.logprobs else None

    @property
    def template_variables(self) -> dict[str, Any]:
        """Beside the messages."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **self.chat_template_kwargs}

    @property
    def template_messages(self) -> list[dict[str, Any]]:
        """Raises BadRequestError, see to_template."""
        return to_template(self.messages)
