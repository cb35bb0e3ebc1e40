"""Which tokens end a text."""

from pagefleet_server.gguf_metadata import GGUFMetadata
from pagefleet_server.models.checkpoint import Checkpoint
from pagefleet_server.tokenizer import CONTROL, read_json

_GGUF_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_GGUF_ENDS = frozenset(
    {
        "<EOT>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<|call|>",
        "<|end_of_text|>",
        "<|end|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|im_end|>",
        "<|return|>",
    }
)
"""Control tokens that end a text whatever the file's keys say: files name one end, chat models have several. llama.cpp
goes by these names, too."""


def eos_token_ids(checkpoint: Checkpoint, of_config: object) -> tuple[int, ...]:
    """generation_config.json, else of_config, the configuration's; for .gguf files their metadata."""
    if checkpoint.gguf is not None:
        return token_ids([*(checkpoint.gguf.get_int(key) for key in _GGUF_KEYS), *_named_ends(checkpoint.gguf)])
    value = read_json(checkpoint.directory / "generation_config.json").get("eos_token_id")
    return token_ids(of_config if value is None else value)


def _named_ends(gguf: GGUFMetadata) -> list[int]:
    tokens = gguf.get_strings("tokenizer.ggml.tokens") or []
    types = gguf.get_ints("tokenizer.ggml.token_type") or []
    return [
        i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == CONTROL and token in _GGUF_ENDS
    ]


def token_ids(value: object) -> tuple[int, ...]:
    """One id, a list of them or nothing -> sorted, without doubles and what is no id."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(sorted({value for value in values if isinstance(value, int) and not isinstance(value, bool)}))
