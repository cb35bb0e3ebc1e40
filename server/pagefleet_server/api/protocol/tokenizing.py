"""Bodies of POST /tokenize and /detokenize (vLLM's)."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from pagefleet_server.api.protocol.chat import MAX_MESSAGES, Message
from pagefleet_server.api.protocol.sampling import Flag, TokenId


class TokenizeBody(BaseModel):
    """Either `prompt` or `messages`."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: Flag | None = None
    """Absent: true for a prompt, false for messages."""
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    return_token_strs: Flag = False

    @model_validator(mode="after")
    def _check_one(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages and self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message needs add_generation_prompt: false")
        return self


class DetokenizeBody(BaseModel):
    """Token ids to write as text."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    skip_special_tokens: Flag = False
