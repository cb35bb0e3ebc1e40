"""Reading a configuration so that nothing in it goes unnoticed."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from pagefleet_server.models.fused.spec import NotFused

_T = TypeVar("_T")

HARMLESS = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "_sliding_window_pattern",
        "attention_dropout",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "embd_pdrop",
        "embedding_dropout",
        "eos_token_id",
        "hidden_dropout",
        "id2label",
        "is_llama_config",
        "label2id",
        "max_length",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "residual_dropout",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
"""Keys that change nothing for inference. (pretraining_tp splits a linear and sums the parts: the same numbers.)"""


class ConfigReader:
    """A configuration of which each key is asked for once; `finish` refuses what nobody asked for."""

    def __init__(self, values: Mapping[str, object], defaults: Mapping[str, object]) -> None:
        """values: config.json. defaults: the architecture's own, for keys that are absent (null is not absent)."""
        self._values = values
        self._defaults = defaults
        self._seen: set[str] = set()

    def integer(self, key: str) -> int:
        """>= 1. Raises NotFused for anything else."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise NotFused(f"{key} is {value!r}")
        return value

    def integer_or_none(self, key: str) -> int | None:
        """None when null or absent without default."""
        return None if self.get(key) is None else self.integer(key)

    def number(self, key: str) -> float:
        """Positive."""
        return self._number(key, self.get(key))

    def number_or_none(self, key: str) -> float | None:
        """None when null or absent without default."""
        value = self.get(key)
        return None if value is None else self._number(key, value)

    def flag(self, key: str) -> bool:
        """A truth value; null and absent are false."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise NotFused(f"{key} is {value!r}")
        return bool(value)

    def text(self, key: str) -> str:
        """A string."""
        value = self.get(key)
        if not isinstance(value, str):
            raise NotFused(f"{key} is {value!r}")
        return value

    def mapping(self, key: str) -> Mapping[str, object]:
        """An object; empty when null or absent."""
        value = self.get(key)
        if value is None:
            return MappingProxyType({})
        if not isinstance(value, dict):
            raise NotFused(f"{key} is no object")
        return value

    def items(self, key: str, kind: type[_T]) -> list[_T] | None:
        """A list of one type; None when null or absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise NotFused(f"{key} is no list of {kind.__name__}")
        return value

    def get(self, key: str) -> object:
        """The value as it is, else the default, else None."""
        self._seen.add(key)
        return self._values.get(key, self._defaults.get(key))

    def finish(self) -> None:
        """Raises NotFused for keys that were not asked for, are not harmless, and hold anything."""
        unknown = sorted(
            key
            for key, value in self._values.items()
            if key not in self._seen and key not in HARMLESS and value not in (None, False, [], {})
        )
        if unknown:
            raise NotFused(f"its configuration has {', '.join(unknown[:8])}, which the fused decoder does not know")

    @staticmethod
    def _number(key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < float("inf"):
            raise NotFused(f"{key} is {value!r}")
        return float(value)
