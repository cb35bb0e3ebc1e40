"""Body of POST /v1/completions."""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from pagefleet_server.api.logprobs import MAX_TOP_LOGPROBS
from pagefleet_server.api.protocol.sampling import Flag, SamplingBody, TokenId

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16


def _prompt_shape(value: Any) -> str | None:
    if isinstance(value, str):
        return "one-text"
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, bool):
        return None
    shapes = {str: "many-texts", int: "one-id-list", list: "many-id-lists"}
    return next((shape for kind, shape in shapes.items() if isinstance(first, kind)), None)


TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Tag("one-text")]
    | Annotated[TokenIds, Tag("one-id-list")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("many-texts")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("many-id-lists")],
    Discriminator(
        _prompt_shape,
        custom_error_type="prompt_shape",
        custom_error_message="must be a text, a list of texts, token ids, or a list of lists of token ids; not empty",
    ),
]


def as_prompts(prompt: Prompt) -> list[str | list[int]]:
    """One entry for each prompt."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]  # a list holds one kind
    return list(prompt)


class CompletionBody(SamplingBody):
    """`prompt`: a text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """0: the prompt alone, with its log-probabilities where they are asked for; needs echo."""
    echo: Flag = False
    """The prompt's text in front of the output."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Log-probabilities of the drawn tokens and of so many of the likeliest."""
    add_special_tokens: Flag = True
    """Text prompts get what the tokenizer adds, such as a BOS token."""

    @property
    def num_logprobs(self) -> int | None:
        """As `logprobs` says."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """An echo with logprobs tells those of the prompt, too."""
        asked = [count for count in (self.prompt_logprobs, self.logprobs if self.echo else None) if count is not None]
        return max(asked, default=None)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry for each prompt."""
        return as_prompts(self.prompt)
