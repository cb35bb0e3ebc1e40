"""Where the stages of gpu_e2e.py run, how much they do, and what they tell."""

from dataclasses import dataclass
from typing import Any

from benchmarks import gpu_models

Facts = dict[str, Any]


class StageFailedError(Exception):
    """It ran, and what came out is wrong."""

    def __init__(self, message: str, facts: Facts) -> None:
        super().__init__(message)
        self.facts = facts


@dataclass(frozen=True, slots=True)
class Setting:
    """Where, and how much."""

    device: str
    """cuda or cpu."""
    tiny: bool
    """A model of a few thousand weights, and few requests: to try the script itself."""

    @property
    def dtype(self) -> str:
        """Of the decode stages."""
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def large(self) -> dict[str, Any]:
        """The model of the speed stages."""
        return gpu_models.TINY if self.tiny else gpu_models.LLAMA_1B

    @property
    def small(self) -> dict[str, Any]:
        """The model that is compared with transformers."""
        return gpu_models.TINY if self.tiny else gpu_models.TWO_LAYERS
