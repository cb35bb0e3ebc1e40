"""How far a load is: told often enough, not too often, and to the end."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagefleet_kernels.dispatch import select_backend
from pagefleet_server.models.executor import open_model
from pagefleet_server.models.load_progress import Paced, describe, told_by_memory
from pagefleet_server.settings import ModelSettings
from support.fused_cases import FUSED_CASES
from support.tiny_models import write_tiny


def test_an_hour_of_loading_is_told_every_two_seconds_and_at_its_end() -> None:
    seconds = 0.0
    told: list[tuple[float, int]] = []
    paced = Paced(lambda done, _total: told.append((seconds, done)), 2.0, clock=lambda: seconds)
    for done in range(1, 36_001):  # ten tensors a second
        seconds = done / 10
        paced(done, 36_000)
    gaps = {round(after - before, 3) for (before, _), (after, _) in itertools.pairwise(told)}
    assert gaps == {2.0}
    assert told[0][0] == 2.0
    assert told[-1] == (3600.0, 36_000)


def test_a_short_load_is_told_once() -> None:
    told: list[tuple[int, int]] = []
    paced = Paced(lambda *numbers: told.append(numbers), 2.0, clock=lambda: 0.0)
    for done in (1, 2, 3):
        paced(done, 3)
    assert told == [(3, 3)]


def pauses(count: int) -> Iterator[bool]:
    yield from itertools.repeat(False, count)
    yield from itertools.repeat(True)


def test_what_foreign_code_holds_counts_as_loaded() -> None:
    """Memory may also shrink, or grow beyond the weights: never less than nothing, nor complete before it is."""
    held = iter((1000, 900, 1030, 1200))
    told: list[tuple[int, int]] = []
    looks, done = pauses(3), threading.Event()

    def pause(ended: threading.Event) -> bool:
        over = next(looks)
        if over:
            done.set()
            ended.wait()
        return over

    with told_by_memory(100, lambda *numbers: told.append(numbers), held_bytes=lambda: next(held), pause=pause):
        done.wait()
    assert told == [(0, 100), (30, 100), (99, 100), (100, 100)]


def test_a_load_that_fails_is_never_told_complete() -> None:
    told: list[tuple[int, int]] = []
    with (
        pytest.raises(OSError, match="broken"),
        told_by_memory(100, lambda *numbers: told.append(numbers), held_bytes=lambda: 0, pause=lambda _: True),
    ):
        raise OSError("broken")
    assert told == []


@pytest.mark.parametrize("name", ["llama", "llama, tied", "phi3", "starcoder2", "gemma3"])
def test_the_fused_decoder_tells_of_every_byte(tmp_path: Path, name: str) -> None:
    model_type, changes = FUSED_CASES[name]
    settings = ModelSettings(model=str(write_tiny(tmp_path, model_type, **changes)), device="cpu", dtype="float32")
    told: list[tuple[int, int]] = []
    opened = open_model(settings)
    opened.load(select_backend(torch.device("cpu"), "reference"), lambda *numbers: told.append(numbers))
    assert len({total for _, total in told}) == 1
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1] > 0


def test_transformers_path_tells_the_end(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    path = write_tiny(tmp_path, "mixtral")
    open_model(ModelSettings(model=str(path), device="cpu"), tell=lambda *numbers: told.append(numbers))
    assert told[-1][0] == told[-1][1] > 0


def test_sizes_are_told_so_that_one_can_read_them() -> None:
    assert describe(3 * 2**29, 14 * 2**30) == "1.5 of 14.0 GiB (10 %)"
    assert describe(0, 0) == "0.0 of 0.0 GiB (0 %)"
