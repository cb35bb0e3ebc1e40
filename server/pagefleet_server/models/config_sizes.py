"""Sizes in config.json that no model has: told by name, before anything is built of them. Torch-free."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from pagefleet_server.model_errors import ModelError

LARGEST: Mapping[str, int] = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 100_000,
    "num_key_value_heads": 100_000,
    "head_dim": 100_000,
    "hidden_size": 10_000_000,
    "intermediate_size": 10_000_000,
    "vocab_size": 100_000_000,
    "max_position_embeddings": 1_000_000_000,
}
"""Key -> far above what is there today. Without a bound a wrong number takes minutes, or all memory, before it fails;
and a negative number of layers would be served, as a model without layers."""


def check_sizes(file: Path, config: Mapping[str, object]) -> None:
    """Of the configuration and of those nested in it. A list (a size for each layer), null and absent are others' to
    judge. Raises ModelError naming the key."""
    for values in _levels(config):
        for key, largest in LARGEST.items():
            value = values.get(key)
            if isinstance(value, bool | str | float) or (isinstance(value, int) and not 1 <= value <= largest):
                raise ModelError(
                    f"{file}: {key} is {str(value)[:100]!r}; it must be a whole number from 1 to {largest}; fetch the "
                    "model's own configuration"
                )


def _levels(config: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    yield config
    yield from (value for key, value in config.items() if key.endswith("_config") and isinstance(value, dict))
