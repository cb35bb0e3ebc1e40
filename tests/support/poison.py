"""Memory that shows when nobody wrote it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def poison_new_tensors() -> None:
    """torch.empty and its like hold NaN, or the largest whole number, from now on: torch's own switch does that too."""
    torch.use_deterministic_algorithms(True, warn_only=True)


@contextmanager
def poisoned_tensors() -> Iterator[None]:
    """The same for a while."""
    before = torch.are_deterministic_algorithms_enabled()
    poison_new_tensors()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
