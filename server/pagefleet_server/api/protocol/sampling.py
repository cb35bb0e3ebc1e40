"""What completions and chat share: how tokens are drawn, when the output ends, how it is sent."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from pagefleet_server.api.logprobs import MAX_TOP_LOGPROBS

MAX_STOPS = 32
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_ALLOWED_IDS = 65536
MAX_CHOICES = 128
"""Of one prompt (`n`)."""
INT64 = 2**63


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _check_biases(value: object) -> object:
    """Before its entries are looked at, each of which would be a complaint of its own."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} entries are allowed, {len(value)} are given")
    return value


def _check_stops(stops: list[str] | None) -> list[str] | None:
    if stops is not None and "" in stops:
        raise ValueError("a stop string must not be empty")
    return stops


StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    list[StopString] | None,
    Field(max_length=MAX_STOPS),
    BeforeValidator(_as_list, json_schema_input_type=StopString | list[StopString] | None),
    AfterValidator(_check_stops),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
TokenKey = Annotated[str, Field(pattern=r"^\d{1,9}$")]
BadWord = Annotated[str, Field(pattern=r"\S", max_length=MAX_STOP_CHARS)]


class StreamOptions(BaseModel):
    """How a stream tells its usage."""

    model_config = ConfigDict(extra="ignore")
    include_usage: Flag = False
    """One more event at the end with `usage` and no choices."""
    continuous_usage_stats: Flag = False
    """`usage` so far in every event; needs include_usage."""


class SamplingBody(BaseModel):
    """Base of the two generation bodies. Null means the default, as in OpenAI's API."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: Annotated[str, Field(max_length=1024)] | None = None
    """Must be the served name when given."""
    stream: Flag = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    """0 and -1 keep all."""
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """Tokens less than min_p times as likely as the likeliest are left out."""
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0
    """Over prompt and output; 1 is off."""
    logit_bias: Annotated[
        dict[TokenKey, Bias], Field(max_length=MAX_BIASES), BeforeValidator(_check_biases, dict[TokenKey, Bias])
    ] = Field(default_factory=dict)
    """Token id (as JSON's keys are: text) -> added to its logit."""
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_IDS, fail_fast=True)] | None
    ) = None
    """Only these may be drawn."""
    response_format: dict[str, JsonValue] | None = None
    """text, json_object, or json_schema with its schema."""
    structured_outputs: dict[str, JsonValue] | None = None
    """One of json (a schema), json_object, regex, choice, grammar (Lark or GBNF)."""
    guided_json: dict[str, JsonValue] | str | None = None
    """Older name of structured_outputs.json; so are the next three."""
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] = Field(default_factory=list)
    """Texts that may not come about."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Log-probabilities of the prompt's tokens and of so many of the likeliest; not in a stream, and with n = 1."""
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    """Choice i is drawn with seed + i."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stops = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] = Field(default_factory=list)
    include_stop_str_in_output: Flag = False
    ignore_eos: Flag = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    skip_special_tokens: Flag = True
    priority: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """The smaller, the sooner it runs. A client can only stand back: nobody takes another's place."""
    cache_salt: Annotated[str, Field(max_length=1024)] = ""
    """Only requests with the same salt share cached blocks."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds from arrival after which the answer must be complete."""
    return_token_ids: Flag = False
    """Token ids of prompt and output beside the text."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        """`"stop": null` means that the field is not given."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    @model_validator(mode="after")
    def _check_sampling(self) -> "SamplingBody":
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs are not told in a stream")
        if self.num_prompt_logprobs is not None and self.n > 1:
            raise ValueError("log-probabilities of the prompt need n = 1")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are only allowed with stream: true")
        return self

    @property
    def structures(self) -> dict[str, Any]:
        """structured_outputs, the older names among them."""
        older = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        return {
            **{name: value for name, value in older.items() if value is not None},
            **(self.structured_outputs or {}),
        }

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told beside the drawn one; None: no log-probabilities."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens."""
        return self.prompt_logprobs

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage event."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every event of a stream has the usage so far."""
        return self.wants_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats
