"""What one engine can hold and do: fixed at its start."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Raises ValueError on values that could never work together."""

    num_blocks: int
    """Usable blocks, >= 1."""
    block_size: int
    """Tokens per block, >= 1."""
    max_model_len: int
    """Prompt plus generated tokens of one request, >= 1; more than the blocks hold is never used."""
    max_num_seqs: int
    """Running requests, >= 1."""
    max_num_batched_tokens: int
    """Tokens of one step; >= max_num_seqs, so that every running request gets at least one."""
    max_step_seconds: float | None = None
    """Prompt chunks are cut so that a step with decodes in it takes no longer by prediction (but at least as long as
    its decodes take twice, or prompts would never get in). None: only max_num_batched_tokens cuts them."""
    max_num_waiting: int = 16384
    """Requests in the queue, a bound of last resort: the API refuses long before."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_step_seconds is not None and self.max_step_seconds <= 0:
            raise ValueError(f"max_step_seconds is {self.max_step_seconds}; it must be positive, or None for no limit")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs {self.max_num_seqs};"
                " raise the first or lower the second, or a running request could get no token in a step"
            )
