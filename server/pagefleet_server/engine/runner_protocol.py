"""What the loop needs of a runner. The real one is in pagefleet_server.runner."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from pagefleet_server.core.step import SchedulerOutput, StepResult
from pagefleet_server.models.load_progress import Progress
from pagefleet_server.settings import EngineSettings


class Runner(Protocol):
    """A loaded model with its KV cache."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    @property
    def num_blocks(self) -> int:
        """Usable blocks; the null block is on top."""

    @property
    def max_model_len(self) -> int:
        """Prompt plus generated tokens of one request."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """The model's own end tokens."""

    @property
    def vocab_size(self) -> int:
        """Token ids are 0..vocab_size - 1."""

    @property
    def attention_backend(self) -> str:
        """Name for the metrics."""

    @property
    def linear_backend(self) -> str:
        """Name for the metrics."""

    @property
    def pooling(self) -> Literal["last", "mean"] | None:
        """The kind of embeddings that it makes; None: texts."""

    @property
    def start_seconds(self) -> Mapping[str, float]:
        """Phase -> seconds it took."""

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run one step. Any exception ends the engine; a request that cannot be answered fails in the result alone."""

    def check(self) -> None:
        """Raise when no request can be answered any more: asked after a step in which all failed."""


BuildRunner = Callable[[EngineSettings, Progress], Runner]
