"""Body of POST /v1/embeddings."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pagefleet_server.api.protocol.completions import Prompt, as_prompts
from pagefleet_server.api.protocol.sampling import Flag

MAX_DIMENSIONS = 65536


class EmbeddingBody(BaseModel):
    """`input`: a text, a list of texts, token ids, or a list of lists of token ids."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: Annotated[str, Field(max_length=1024)] | None = None
    """Must be the served name when given."""
    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    """base64: of the numbers as float32, little-endian."""
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    """Only the first so many, normed again: for models that were trained for it."""
    add_special_tokens: Flag = True
    """Texts get what the tokenizer adds, such as a final EOS token."""
    cache_salt: Annotated[str, Field(max_length=1024)] = ""
    """Changes nothing: embeddings share no cached blocks."""
    priority: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """The smaller, the sooner it runs."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds from arrival after which the answer must be complete."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        """`"dimensions": null` means that the field is not given."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    @property
    def inputs(self) -> list[str | list[int]]:
        """One entry for each input."""
        return as_prompts(self.input)
