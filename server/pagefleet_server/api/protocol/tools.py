"""Tools of a chat request: functions that the model may ask to be called."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

MAX_TOOLS = 128


class Function(BaseModel):
    """What the model is told of a function."""

    model_config = ConfigDict(extra="ignore")
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Annotated[str, Field(max_length=16384)] | None = None
    parameters: dict[str, JsonValue] | None = None
    """JSON schema; told to the model, not enforced."""

    def to_template(self) -> dict[str, Any]:
        """As templates expect it."""
        shown = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {name: value for name, value in shown.items() if value is not None}


class Tool(BaseModel):
    """OpenAI's wrapping."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["function"] = "function"
    function: Function

    def to_template(self) -> dict[str, Any]:
        """As templates expect it."""
        return {"type": self.type, "function": self.function.to_template()}
