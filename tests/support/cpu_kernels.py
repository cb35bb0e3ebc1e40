"""The CPU kernels at every level that this machine can run, and calls of them on cases of the attention oracle."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from pagefleet_kernels.cpu.backend import CpuBackend
from pagefleet_kernels.cpu.build import build, cache_dir, find_compiler
from pagefleet_kernels.cpu.cache import CpuCache
from pagefleet_kernels.cpu.isa import INSTRUCTION_SETS, cpu_flags, supported_sets
from pagefleet_kernels.cpu.library import Library, find_library, load
from pagefleet_kernels.errors import BackendUnavailable
from support.attention_oracle import World

LEVELS = [level.name for level in INSTRUCTION_SETS]
CPU = torch.device("cpu")
NAN_WORDS = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC07FC0}


@functools.cache
def library(level_name: str) -> Library:
    """The library of a level; skips the test where this machine can neither run nor build it."""
    for level in supported_sets(cpu_flags()):
        if level.name != level_name:
            continue
        try:
            best = find_library()
            return best if best.level == level else load(build(level, find_compiler(), cache_dir()), level)
        except BackendUnavailable as error:
            pytest.skip(error.reason)
    pytest.skip(f"this CPU does not have {level_name}")


def backend(level_name: str = LEVELS[0], num_threads: int = 1) -> CpuBackend:
    """A backend of a level; the best level falls back to what the machine has."""
    return CpuBackend(library(level_name if level_name in _here() else LEVELS[-1]), num_threads=num_threads)


@functools.cache
def _here() -> frozenset[str]:
    return frozenset(level.name for level in supported_sets(cpu_flags()))


def poisoned_cache(owner: CpuBackend, world: World) -> CpuCache:
    """A cache full of NaN in which only the world's history is written."""
    cache = owner.allocate(
        world.case.shape,
        num_blocks=world.num_blocks,
        block_size=world.case.block_size,
        dtype=world.query.dtype,
        device=CPU,
    )
    cache.words.fill_(NAN_WORDS[cache.dtype])
    owner.write_kv(cache, world.history_keys, world.history_values, world.history_slots)
    return cache


def attend(owner: CpuBackend, world: World) -> torch.Tensor:
    """The world's attention from a poisoned cache."""
    case = world.case
    return owner.paged_attention(
        world.query,
        poisoned_cache(owner, world),
        world.batch,
        scale=case.scale,
        sliding_window=case.sliding_window,
        softcap=case.softcap,
        sinks=world.sinks,
    )


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch with so many threads, then as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
