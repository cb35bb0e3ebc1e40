"""Which tokens end a text."""

from pagefleet_server.models.checkpoint import Checkpoint
from pagefleet_server.tokenizer import read_json


def eos_token_ids(checkpoint: Checkpoint, of_config: object) -> tuple[int, ...]:
    """generation_config.json, else of_config, the configuration's; for .gguf files their metadata."""
    if checkpoint.gguf is not None:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return token_ids([checkpoint.gguf.get_int(key) for key in keys])
    value = read_json(checkpoint.directory / "generation_config.json").get("eos_token_id")
    return token_ids(of_config if value is None else value)


def token_ids(value: object) -> tuple[int, ...]:
    """One id, a list of them or nothing -> sorted, without doubles and what is no id."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(sorted({value for value in values if isinstance(value, int) and not isinstance(value, bool)}))
