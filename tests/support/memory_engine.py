"""ENGINE_COMMAND: the real engine process around the runner without a model.

The model's name says what goes wrong: "fine", "missing", "no-memory", "loads-for-ever", "fails-at-N" (step N raises),
"stalls-at-N" (step N sleeps without end), "slow-N" (each step takes N ms), "poison" (requests fail whose context holds
POISON_TOKEN_ID), "broken-at-N" (from step N on, every request fails), "loops" (says the same over and over, mostly),
"no-logprobs" (gives none to those who ask, which is a fault of ours).
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

from pagefleet_server.core.step import SchedulerOutput, StepResult
from pagefleet_server.engine import process
from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.load_progress import Progress
from pagefleet_server.settings import CacheSettings, EngineSettings, ModelSettings, ProcessSettings, SchedulerSettings
from support.kv_memory_runner import VOCAB_SIZE, KvMemoryRunner

TESTS = str(Path(__file__).resolve().parents[1])
ENGINE_COMMAND = (
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {TESTS!r}); from support.memory_engine import main; main()",
)


def make_settings(
    model: str = "fine",
    *,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    stall_dump_seconds: float = 30.0,
) -> EngineSettings:
    return EngineSettings(
        model=ModelSettings(model=model),
        cache=CacheSettings(num_kv_blocks=num_blocks, block_size=8),
        scheduler=SchedulerSettings(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
        process=ProcessSettings(stall_dump_seconds=stall_dump_seconds),
    )


class MemoryEngineRunner(KvMemoryRunner):
    """KvMemoryRunner with what the engine process asks of a runner, and with faults on demand."""

    eos_token_ids = (0,)
    vocab_size = VOCAB_SIZE
    attention_backend = "memory"
    linear_backend = "memory"
    pooling = None

    def __init__(self, settings: EngineSettings) -> None:
        assert settings.cache.num_kv_blocks is not None
        super().__init__(
            num_blocks=settings.cache.num_kv_blocks,
            block_size=settings.cache.block_size,
            poison=settings.model.model == "poison",
            loops=settings.model.model == "loops",
        )
        self.num_blocks = settings.cache.num_kv_blocks
        self.max_model_len = self.num_blocks * self.block_size
        self.start_seconds = {"load_weights": 0.0}
        self._fault, _, number = settings.model.model.rpartition("-")
        self._number = int(number) if number.isdigit() else 0
        self._num_steps = 0
        self._without_logprobs = settings.model.model == "no-logprobs"

    def execute(self, output: SchedulerOutput) -> StepResult:
        self._num_steps += 1
        if self._fault == "slow":
            time.sleep(self._number / 1000)
        elif self._num_steps == self._number and self._fault == "fails-at":
            raise RuntimeError("the device is lost")
        elif self._num_steps == self._number and self._fault == "stalls-at":
            time.sleep(1e6)
        result = super().execute(output)
        if self._without_logprobs:
            result = replace(result, logprobs={})
        if self._is_broken:
            return StepResult({}, failed=dict.fromkeys(result.sampled, "not a number"))
        return result

    def check(self) -> None:
        if self._is_broken:
            raise RuntimeError("the model gives no numbers any more")

    @property
    def _is_broken(self) -> bool:
        return self._fault == "broken-at" and self._num_steps >= self._number


def build_runner(settings: EngineSettings, progress: Progress) -> MemoryEngineRunner:
    progress("load_weights", "nothing to load")
    if settings.model.model == "loads-for-ever":
        progress("load_weights", "a third", done_bytes=1000, total_bytes=3000)
        time.sleep(1e6)
    if settings.model.model == "missing":
        raise ModelError("model 'missing' is not there; give a directory or a .gguf file")
    if settings.model.model == "no-memory":
        raise MemoryError("no room for the KV cache")
    return MemoryEngineRunner(settings)


def main() -> None:
    process.main(sys.argv[1:], build_runner)
