"""How the model's makers want tokens drawn when a request does not say: generation_config.json, as vLLM reads it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from pagefleet_server.api.protocol.sampling import SamplingBody
from pagefleet_server.model_errors import ModelError
from pagefleet_server.tokenizer import read_json

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The file's names are the requests'. do_sample says nothing: transformers writes it whatever the rest says."""
FILE = "generation_config.json"
Body = TypeVar("Body", bound=SamplingBody)


def load_generation_defaults(path: Path) -> dict[str, float]:
    """Of a Hugging Face directory; {} for a .gguf file and without the file. Raises ModelError for values that no
    request could have."""
    file = path / FILE
    found = read_json(file)
    values = {name: found[name] for name in NAMES if found.get(name) is not None}
    try:
        SamplingBody.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        name = str(fault["loc"][0]) if fault["loc"] else "a value"
        raise ModelError(
            f"{file}: {name} is {str(values.get(name))[:50]}: {fault['msg']}; correct it, or start with "
            "--no-generation-config"
        ) from error
    return values


def with_defaults(body: Body, defaults: Mapping[str, float]) -> Body:
    """The body with the model's values where the request has none."""
    missing = {name: value for name, value in defaults.items() if name not in body.model_fields_set}
    return body.model_copy(update=missing) if missing else body
